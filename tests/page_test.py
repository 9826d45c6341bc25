"""The page in a browser: a record, and text that is no markup."""

import shutil

import pytest

from specdec_jax import show
from tests import show_test

playwright = pytest.importorskip(
  'playwright.sync_api', reason='needs pip install "specdec_jax[browser]"'
)
CHROMIUM = shutil.which('chromium')
EVIL = '<img src=x onerror="hurt=1"><script>hurt=1</script>\n'
pytestmark = pytest.mark.more


@pytest.fixture(scope='module')
def browser():
  if not CHROMIUM:
    pytest.skip('needs Chromium')
  with playwright.sync_playwright() as p:
    yield p.chromium.launch(executable_path=CHROMIUM, args=['--no-sandbox'])


@pytest.fixture
def tab(browser):
  """A narrow tab, in which no script may fail."""
  errors, size = [], {'width': 320, 'height': 640}
  tab = browser.new_page(viewport=size)
  tab.on('pageerror', lambda error: errors.append(error))
  yield tab
  assert not errors
  # No text was run or became elements; no line is too long.
  assert tab.evaluate('typeof hurt') == 'undefined'
  assert tab.locator('img, i, b').count() == 0
  assert tab.evaluate('document.documentElement.scrollWidth') == size['width']
  tab.close()


def tokens_of(tab, where):
  script = 'all => all.map(x => [x.classList[1], x.textContent])'
  return [tuple(x) for x in tab.eval_on_selector_all(f'{where} .t', script)]


def counters(tab, where):
  """{name: value} of the counters in an element."""
  names, values = (
    tab.locator(f'{where} {x}').all_inner_texts() for x in ('dt', 'dd')
  )
  return dict(zip(names, values, strict=True))


def shown(texts):
  """Texts as the page shows those of tokens."""
  return [x.replace('\n', '\u23ce\n') or '\u25af' for x in texts]


def test_a_record_is_drawn_token_for_token(tab, tmp_path):
  windows = ('ab', 'xy', 'c'), ('', '', 'd'), (EVIL, '', '\u00e9')
  answers = {EVIL: show_test.answered(EVIL, windows)}
  answers['second'] = show_test.answered('', [('', '', 'e')])
  show.html(answers, tmp_path / 'page.html', command=EVIL)
  tab.goto((tmp_path / 'page.html').as_uri())
  first = 'section:nth-child(1)'
  texts = [*'abcd', *EVIL, '', '\u00e9']
  kinds = ['drafted'] * 2 + ['recovered', 'plain'] + ['drafted'] * len(EVIL)
  found = tokens_of(tab, f'{first} .answer')
  assert found == [*zip(kinds + ['bonus'] * 2, shown(texts), strict=True)]
  row = tokens_of(tab, f'{first} tr:nth-child(1)')
  assert row[2:4] == [('refused', 'x'), ('refused', 'y')]
  cells = tab.locator(f'{first} td:nth-child(2)').all_inner_texts()
  n = len(EVIL)
  assert cells == ['2 of 4', 'no draft', f'{n} of {n}']
  assert tab.locator(f'{first} .prompt').text_content() == EVIL
  assert tab.locator('h2').all_text_contents() == [EVIL, 'second']
  assert f'command: {EVIL}' in tab.locator('#settings').text_content()
  assert counters(tab, '#total') == {
    'tokens': str(n + 7),
    'windows': '4',
    'tokens a window': f'{(n + 7) / 4:.2f}',
    'drafts accepted': f'{n + 2} of {n + 4}',
  }
  # By keyboard alone: to the answer, and to its second token.
  tab.locator('.answer').first.focus()
  tab.keyboard.press('ArrowRight')
  tab.keyboard.press('ArrowRight')
  assert tab.locator('output').inner_text() == 'drafted, id 98, p 0.325, q 0.5'
  tab.locator('td .refused').first.hover()
  assert tab.locator('output').inner_text() == 'refused, id 120, q 0.5'
