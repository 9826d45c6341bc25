"""docs/page.png: the page of a server, with a prompt typed and answered twice.

python scripts/serve.py --config=configs/smollm2.py --rows=1 --logprobs=1
python experiments/serving/picture.py  # meanwhile; needs Chromium
"""

import pathlib
import shutil

from absl import app, flags
from playwright import sync_api

ROOT = pathlib.Path(__file__).parents[2]
PROMPT = """\
Rewrite the passage below, replacing the city with a village on a mountain \
and the rain with snow. Change as few other words as you can.

Ilse came to the city in the rain. The trams were full and the shop windows \
shone, and nobody looked at anybody. She counted her coins under the station \
clock, bought a bag of hot chestnuts, and asked the man who sold them where \
the violin maker lived."""

_URL = flags.DEFINE_string('url', 'http://127.0.0.1:8000/', 'of the server')


def main(_):
  size = {'width': 900, 'height': 1160}
  with sync_api.sync_playwright() as p:
    browser = p.chromium.launch(
      executable_path=shutil.which('chromium'), args=['--no-sandbox']
    )
    tab = browser.new_page(viewport=size)
    tab.set_default_timeout(300_000)
    tab.goto(_URL.value)
    tab.get_by_label('Tokens').fill('64')
    tab.get_by_label('Prompt').fill(PROMPT)
    for _ in range(2):  # the first answer may wait for a program
      tab.get_by_role('button').click()
      tab.get_by_text('timed once').wait_for()
    tab.evaluate('scrollTo(0, 0)')
    tab.screenshot(path=ROOT / 'docs/page.png')


if __name__ == '__main__':
  app.run(main)
