"""The style and the script of record_page; both are checked by their hash."""

STYLE = """
:root{--paper:#fff;--ink:#1c1e21;--dim:#5b6068;--line:#d4d7dc;--soft:#f4f5f7;
--d:#d3f0e2;--d-line:#00724a;--r:#d8e7fb;--r-line:#0b56a8;--b:#f4e1f4;
--b-line:#8a2f92;--x:#fde4d8;--x-line:#a8330a;--p-line:#8b919a;
color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--paper:#15181c;--ink:#e7e9ec;
--dim:#a3a9b2;--line:#3a4048;--soft:#1e2228;--d:#0f3d2c;--d-line:#41d69c;
--r:#15355c;--r-line:#7ab8ff;--b:#432348;--b-line:#ea9bf0;--x:#4a2212;
--x-line:#ff9c73;--p-line:#7d848e}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:62rem;padding:1rem 1rem 9rem;
background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;margin:.2rem 0 .6rem}
h2{font-size:1.15rem;margin:2rem 0 .3rem;padding-top:.8rem;
border-top:1px solid var(--line);overflow-wrap:anywhere}
p{margin:.3rem 0 .7rem}
a{color:var(--r-line)}
ul,ol{list-style:none;margin:0;padding:0}
.cards{display:flex;flex-wrap:wrap;gap:.6rem}
.cards li{background:var(--soft);border-radius:.4rem;padding:.4rem .8rem;
color:var(--dim);font-size:.85rem;flex:1 1 auto}
.cards b{display:block;color:var(--ink);font-size:1.35rem;line-height:1.3}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.4rem;margin:.9rem 0 .3rem;
font-size:.9rem}
.hint{color:var(--dim);font-size:.85rem}
details{margin:.6rem 0}
summary{cursor:pointer;color:var(--dim);font-size:.9rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem;
margin:.4rem 0;font-size:.9rem}
dt{color:var(--dim)}
dd{margin:0;overflow-wrap:anywhere;min-width:0}
.text{white-space:pre-wrap;overflow-wrap:anywhere;tab-size:4;line-height:1.75}
.answer{margin:.7rem 0}
.prompt{color:var(--dim);border-left:3px solid var(--line);padding-left:.8rem;
margin:.4rem 0;font-size:.95rem;line-height:1.5}
.t{border-bottom:3px none transparent;border-radius:.15rem;white-space:pre-wrap;
-webkit-box-decoration-break:clone;box-decoration-break:clone}
.drafted{background:var(--d);border-bottom:2px solid var(--d-line)}
.recovered{background:var(--r);border-bottom:4px double var(--r-line)}
.bonus{background:var(--b);border-bottom:3px dotted var(--b-line)}
.t.refused{background:var(--x);color:var(--x-line);
text-decoration:line-through;text-decoration-thickness:2px}
.t.cut{color:var(--dim);border-bottom:2px dashed var(--p-line)}
.answer .t:hover,.answer .t:focus{outline:2px solid var(--ink);
outline-offset:1px}
.m,.c{font-style:normal;font-size:.8em;color:var(--dim);-webkit-user-select:none;
user-select:none}
.c{border:1px solid var(--dim);border-radius:.2rem;padding:0 .15rem}
.bars{display:flex;flex-wrap:wrap;gap:3px;align-items:flex-end;margin:.5rem 0}
.bars span{display:flex;flex-direction:column-reverse;gap:1px}
.bars i{display:block;width:8px;height:8px;border:1px solid transparent}
.bars .drafted{background:var(--d-line)}
.bars .end{background:var(--r-line);border-radius:50%}
.bars .none{background:var(--p-line);border-radius:50%}
.bars .cut{border:1px dashed var(--p-line)}
.bars .refused{border-color:var(--x-line);background:none}
.calls li{display:grid;grid-template-columns:4.2rem 4.6rem minmax(0,1fr);
gap:.6rem;padding:.1rem 0;border-top:1px solid var(--line);font-size:.92rem}
.calls .head{border-top:0}
.calls .head span{color:var(--dim);font-size:.8rem;padding:0}
.calls .n{color:var(--dim);font-variant-numeric:tabular-nums;
padding-top:.15rem;font-size:.85rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.85rem;margin:.4rem 0}
th,td{padding:.15rem .7rem .15rem 0;text-align:right;vertical-align:top;
border-bottom:1px solid var(--line);font-variant-numeric:tabular-nums}
th{color:var(--dim);font-weight:normal;white-space:nowrap}
main th:nth-child(2),main td:nth-child(2),main th:last-child,main td:last-child,
nav th:first-child,nav td:first-child{text-align:left}
td .t{line-height:1.6}
#panel{position:fixed;left:0;right:0;bottom:0;background:var(--soft);
border-top:2px solid var(--dim);padding:.5rem max(1rem,calc(50vw - 30rem));
font-size:.9rem;display:flex;flex-wrap:wrap;gap:.1rem 1.2rem;max-height:9rem;
overflow:auto}
#panel[hidden]{display:none}
#panel b{font-weight:normal;color:var(--dim);margin-right:.35rem}
#panel span{white-space:pre-wrap}
@media(max-width:30rem){body{padding:.6rem .7rem 11rem}
.cards li{flex:1 1 40%}dl{gap:.1rem .7rem}
.calls li{grid-template-columns:2.8rem 4.2rem minmax(0,1fr);gap:.3rem}}
@media print{#panel{display:none}body{max-width:none}}
"""

# A token's numbers are in its row of the table; the panel shows them.
SCRIPT = """
const panel = document.getElementById('panel');
function show(token) {
  const row = document.getElementById(token.dataset.r);
  const heads = row.closest('table').querySelectorAll('th');
  panel.replaceChildren();
  row.querySelectorAll('td').forEach((cell, i) => {
    if (!cell.childNodes.length) return;
    const item = document.createElement('div');
    const name = document.createElement('b');
    name.textContent = heads[i].textContent;
    item.append(name, ...Array.from(cell.childNodes, n => n.cloneNode(true)));
    panel.append(item);
  });
  panel.hidden = false;
}
const token = event => event.target.closest('.answer .t');
for (const name of ['pointerover', 'focusin', 'click'])
  document.addEventListener(name, event => token(event) && show(token(event)));
document.addEventListener('keydown', event => {
  if (event.key === 'Escape') panel.hidden = true;
  const from = token(event);
  if (!from) return;
  const to = {ArrowRight: from.nextElementSibling,
              ArrowLeft: from.previousElementSibling,
              Home: from.parentNode.firstElementChild,
              End: from.parentNode.lastElementChild}[event.key];
  if (!to) return;
  event.preventDefault();
  from.tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
});
"""
