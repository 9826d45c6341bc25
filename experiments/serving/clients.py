"""Clients of a server: what they ask, and what became of it."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import httpx2

# Bodies that no server should answer.
MALFORMED = (
  b'{"prompt": "a", "max_tokens": ',
  b'{"prompt": "a", "max_tokens": 0}',
  b'{"prompt": "a", "min_p": 0.5}',
  b'{"prompt": [-1]}',
)


KINDS = 'whole', 'stream', 'cancelled', 'malformed'


class Ask(NamedTuple):
  """kind: one of KINDS; 'cancelled' in mid-stream."""

  kind: str
  body: Any


class Reply(NamedTuple):
  """What a client saw.

  text: the answer's, as far as it came. times: when the request was sent and
  when pieces came, in seconds. counts: the pieces' tokens. waited: how often it
  was told to come again.
  """

  status: int
  text: str
  times: list[float]
  counts: list[int]
  waited: int


def asks(
  prompts: Sequence[Sequence[int]],
  count: int,
  longest: int,
  temperature: float,
  turn: int = 0,
) -> list[Ask]:
  """Makes requests with a seed each: a tenth malformed, a quarter cancelled.

  Their lengths and order are a turn's; no two are the same.
  """
  rng, found = random.Random(turn), []
  for i in range(count):
    body = dict(
      prompt=[*prompts[i % len(prompts)]],
      max_tokens=rng.randint(longest // 16 + 1, longest),
      temperature=temperature,
      seed=i,
    )
    kind = 'malformed' if i % 10 == 5 else ('whole', 'stream')[i % 2]
    if i % 4 == 0:
      kind = 'cancelled'
    if kind != 'whole':
      body['stream'] = True
    found.append(Ask(kind, body))
  return found


async def send(
  client: httpx2.AsyncClient, ask: Ask, headers: Mapping[str, str]
) -> Reply:
  """One request, sent again for as long as the server is full."""
  body = json.dumps(ask.body).encode()
  if ask.kind == 'malformed':
    body = MALFORMED[ask.body['seed'] % len(MALFORMED)]
  for waited in range(10_000):
    times, counts, text = [time.monotonic()], [], ''
    async with client.stream(
      'POST', '/v1/completions', content=body, headers=headers
    ) as reply:
      if reply.status_code != 429:
        async for choice in _choices(reply, 'stream' in ask.body):
          times.append(time.monotonic())
          counts.append(len(choice['specdec_jax']['tokens']))
          text += choice['text']
          if ask.kind == 'cancelled':
            break
        return Reply(reply.status_code, text, times, counts, waited)
    await asyncio.sleep(0.1)
  raise TimeoutError('the server is always full')


async def _choices(reply, stream: bool):
  """The choice of an answer, or of each of its chunks."""
  if reply.status_code != 200:
    return
  if not stream:
    yield json.loads(await reply.aread())['choices'][0]
    return
  async for line in reply.aiter_lines():
    if line.startswith('data: {'):
      found = json.loads(line.removeprefix('data: '))
      assert 'error' not in found, found
      yield found['choices'][0]


def run(
  url: str,
  found: Sequence[Ask],
  clients: int,
  *,
  headers: Mapping[str, str] | None = None,
  after: Callable[[], None] = lambda: None,
) -> list[Reply]:
  """Sends all, so many at a time; after(): called after each."""

  async def every():
    gate = asyncio.Semaphore(clients)
    limits = httpx2.Limits(max_connections=clients)
    async with httpx2.AsyncClient(
      base_url=url,
      headers={'Content-Type': 'application/json'},
      timeout=600,
      limits=limits,
      trust_env=False,
    ) as client:

      async def one(ask):
        async with gate:
          reply = await send(client, ask, headers or {})
          after()
          return reply

      return await asyncio.gather(*map(one, found))

  return asyncio.run(every())


def keeps_up(cells: Sequence[Mapping[str, Any]]) -> bool:
  """Tells whether speculation is nowhere below 0.95 of plain decoding."""
  return all(cell['ratio']['value'] >= 0.95 for cell in cells)
