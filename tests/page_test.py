"""The page in a browser: a record, live answers, and text that is no markup."""

import collections
import json
import shutil

import pytest

from specdec_jax import show
from tests import show_test
from tests.serve import loopback, small

playwright = pytest.importorskip(
  'playwright.sync_api', reason='needs playwright (extra browser)'
)
CHROMIUM = shutil.which('chromium')
URL = 'http://page.test/'
EVIL = '<img src=x onerror="hurt=1"><script>hurt=1</script>\n'
MODEL = dict(id='m', chat=True, logprobs=1, object='model', draft=None)
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
  tab.set_default_timeout(0)  # pytest has one, whatever the load
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
  return [x.replace('\n', '\u21b5\n') or '\u25a0' for x in texts]


def test_a_record_is_drawn_token_for_token(tab, tmp_path):
  windows = ('ab', 'xy', 'c'), ('', '', 'd'), (EVIL, '', 'f')
  answers = {EVIL: show_test.answered(EVIL, windows)}
  answers['second'] = show_test.answered('', [('', '', 'e')])
  show.html(answers, tmp_path / 'page.html', command=EVIL)
  tab.goto((tmp_path / 'page.html').as_uri())
  first = 'section:nth-child(1)'
  texts = [*'abcd', *EVIL, 'f']
  kinds = ['drafted'] * 2 + ['recovered', 'plain'] + ['drafted'] * len(EVIL)
  found = tokens_of(tab, f'{first} .answer')
  assert found == [*zip([*kinds, 'bonus'], shown(texts), strict=True)]
  row = tokens_of(tab, f'{first} tr:nth-child(1)')
  assert row[2:4] == [('refused', 'x'), ('refused', 'y')]
  cells = tab.locator(f'{first} td:nth-child(2)').all_inner_texts()
  n = len(EVIL)
  assert cells == ['2', 'no draft', str(n)]
  assert tab.locator(f'{first} .prompt').text_content() == EVIL
  assert tab.locator('h2').all_text_contents() == [EVIL, 'second']
  assert f'command: {EVIL}' in tab.locator('#settings').text_content()
  assert counters(tab, '#total') == {
    'tokens': str(n + 6),
    'windows': '4',
    'tokens a window': f'{(n + 6) / 4:.2f}',
    'drafts accepted': f'{n + 2} of {n + 4}',
  }
  assert not tab.locator('#ask').is_visible()
  # By keyboard alone: to the answer, and to its second token.
  tab.locator('.answer').first.focus()
  tab.keyboard.press('ArrowRight')
  tab.keyboard.press('ArrowRight')
  said = tab.locator('output').inner_text()
  assert said == 'drafted, id 98, p 0.325, q 0.5, entropy 0.25'
  tab.locator('td .refused').first.hover()
  assert tab.locator('output').inner_text() == 'refused, id 120, q 0.5'


# --- live --------------------------------------------------------------------


TOKENS = [(EVIL, 'drafted'), ('', 'drafted'), ('\u05d0', 'bonus')]
TOKENS += [('d', 'plain')]
MANY = [('y', 'drafted')] * 29  # fewer than 32 in all tell no speed


def event(**fields):
  return f'data: {json.dumps(fields)}\n\n'


def window(*tokens, end=None, refused=()):
  """An event of a window of (text, origin) tokens, and of refused drafts."""
  texts, origins = zip(*tokens, strict=True)
  own = dict(tokens=[*map(len, texts)], origins=origins, texts=texts)
  own |= dict(entropies=[0.5] * len(texts), refused=refused)
  chances = {'content': [{'logprob': -0.125 - i} for i in range(len(tokens))]}
  choice = dict(finish_reason=end, logprobs=chances, specdec_jax=own)
  return event(choices=[choice])


def end(rate, drafted=0):
  counts = {'num_draft_tokens': drafted} if drafted else None
  metrics = dict(
    alone=True, tokens_per_second=rate, speculative_decoding=counts
  )
  return event(choices=[], metrics=metrics) + 'data: [DONE]\n\n'


def serve(tab, answer):
  """Opens the page with a server that says answer(speculation); the bodies."""
  bodies = []

  def v1(route):
    headers, body = route.request.headers, route.request.post_data_json
    if body is None:
      route.fulfill(json={'data': [MODEL]})
    else:
      bodies.append(body)
      route.fulfill(body=answer(headers['x-speculation']))

  tab.route(f'{URL}v1/**', v1)
  page = show.PAGE.read_text('utf-8')
  tab.route(
    URL, lambda route: route.fulfill(body=page, content_type='text/html')
  )
  tab.goto(URL)
  return bodies


def twice(speculation):
  """The same tokens in three windows, or plainly in as many as tokens."""
  if speculation == 'on':
    first = window(*TOKENS[:3], refused=[(9, EVIL), (8, '')])
    rest = window(TOKENS[3]), window(*MANY, end='length')
    return ': waiting\n\n' + first + ''.join(rest) + end(50.0, drafted=34)
  return ''.join(window((x, 'plain')) for x, _ in TOKENS + MANY) + end(20.0)


def test_a_prompt_is_answered_twice_and_compared(tab):
  bodies = serve(tab, twice)
  tab.get_by_text('Who made each token of m', exact=True).wait_for()
  assert tab.get_by_label('Prompt').input_value().startswith('Write ')
  tab.get_by_label('Seed').fill('7')
  tab.get_by_label('Prompt').fill(EVIL)
  tab.get_by_label('Prompt').press('Control+Enter')
  tab.get_by_text('2.50 times as fast').wait_for()
  assert 'are the same 33 tokens' in tab.locator('#status').inner_text()
  assert bodies[0] == bodies[1]
  assert bodies[0]['messages'] == [{'role': 'user', 'content': EVIL}]
  assert bodies[0]['seed'] == 7 and bodies[0]['stream'] is True
  assert bodies[0]['logprobs'] is True
  every = TOKENS + MANY
  texts, kinds = shown(x for x, _ in every), [kind for _, kind in every]
  fast, plain = 'section:nth-child(1)', 'section:nth-child(2)'
  assert tokens_of(tab, f'{fast} .answer') == [*zip(kinds, texts, strict=True)]
  assert tokens_of(tab, f'{plain} .answer') == [('plain', x) for x in texts]
  assert counters(tab, fast) == {
    'tokens': '33',
    'windows': '3',
    'tokens a window': '11.00',
    'tokens a second': '50.0',
    'drafts accepted': '31 of 34',
  }
  assert tab.locator(f'{fast} .end').inner_text() == 'Ended by length.'
  assert tab.locator(f'{fast} tr').count() == 3
  windows = tab.locator('details:last-child').evaluate_all(
    'x => x.map(y => y.open)'
  )
  assert windows == [True, False]
  tab.locator('td .refused').last.hover()
  assert tab.locator('output').inner_text() == 'refused, id 8'


@pytest.mark.parametrize(
  'stream, said',
  [
    (window(*TOKENS) + event(error={'message': f'no {EVIL}'}), f'no {EVIL}'),
    (window(*TOKENS), 'The server went away in mid-answer.'),
  ],
)
def test_an_answer_that_breaks_off_is_said_to(tab, stream, said):
  bodies = serve(tab, lambda _: stream)
  tab.get_by_label('Prompt').fill('x')
  tab.get_by_role('button').click()
  tab.get_by_text(said.split('<')[0]).first.wait_for()
  assert tab.get_by_role('alert').text_content() == said
  assert tab.locator('#status').text_content() == ''
  assert len(bodies) == 1 and len(tokens_of(tab, '.answer')) == 4
  assert tab.get_by_role('button').inner_text() == 'Answer'


def test_few_tokens_tell_no_speed(tab):
  some = [('a', 'plain')] * 31
  serve(tab, lambda _: window(*some) + end(50.0))
  tab.get_by_role('button').click()
  tab.get_by_text('Too few tokens to tell which is faster').wait_for()
  assert 'times' not in tab.locator('#status').inner_text()


def test_what_is_stopped_is_said_to_be(tab):
  serve(tab, lambda _: None)
  tab.route(f'{URL}v1/chat/completions', lambda route: None)  # no answer
  tab.get_by_role('button').click()
  tab.get_by_text('Answering, speculation on.').wait_for()
  tab.get_by_role('button').click()
  tab.get_by_text('Stopped.').wait_for()
  assert tab.get_by_role('alert').text_content() == ''


def test_the_counters_are_those_of_the_server(tab):
  """A real one, which wants a key."""
  with loopback.running(small.rows(), key='secret') as (client, _):
    responses = []
    tab.on('response', lambda response: responses.append(response))
    tab.goto(str(client.base_url))
    tab.get_by_text('want Authorization').wait_for()
    tab.get_by_label('Key of the server').fill('secret')
    tab.get_by_label('Prompt').fill('abcabcab')
    tab.get_by_label('Tokens').fill('40')
    tab.get_by_role('button').click()
    tab.get_by_text('times as fast').wait_for()
    found = [x.text() for x in responses if x.request.method == 'POST']
  rates = []
  for n, text in enumerate(found, 1):
    *windows, last = [json.loads(x) for x in text.split('data: ')[1:-1]]
    made = [x['choices'][0]['specdec_jax'] for x in windows]
    kinds = [kind for x in made for kind in x['origins']]
    where, metrics = f'section:nth-child({n})', last['metrics']
    counts = metrics['speculative_decoding'] or collections.Counter()
    calls = sum(x['tokens'] != [] for x in made)
    assert len(kinds) == last['usage']['completion_tokens'] == 40
    rates.append(metrics['tokens_per_second'])
    assert counters(tab, where) == {
      'tokens': '40',
      'windows': str(calls),
      'tokens a window': f'{40 / calls:.2f}',
      'tokens a second': f'{rates[-1]:.1f}',
      'drafts accepted': f'{counts["num_accepted_draft_tokens"]} of '
      f'{counts["num_draft_tokens"]}',
    }
  assert kinds == ['plain'] * 40
  said = tab.locator('#status').inner_text()
  assert f' {rates[0] / rates[1]:.2f} times' in said
  assert 'are the same 40 tokens' in said
