"""hf:org/name[@revision]: a model folder from the Hugging Face Hub.

Uses huggingface_hub, so HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE mean
what they always mean.
"""

import pathlib
import re

# Data only: no code, no pickles. Sub-folders hold other formats of the weights.
WANTED = ['*.json', '*.safetensors', '*.jinja']
UNWANTED = ['*/*', 'consolidated*.safetensors']


def fetch(source: str) -> pathlib.Path:
  """The local folder of a repository, downloaded if it is not there.

  Raises:
    ValueError: no such repository or revision, or no way to reach it.
  """
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
  try:
    folder = huggingface_hub.snapshot_download(
      repo,
      revision=revision,
      allow_patterns=WANTED,
      ignore_patterns=UNWANTED,
    )
  except errors.GatedRepoError as e:
    raise ValueError(
      f'{source}: the Hub asks for permission; accept its terms on the model '
      'page and set HF_TOKEN'
    ) from e
  except errors.RepositoryNotFoundError as e:
    raise ValueError(
      f'{source}: the Hub has no model {repo} (or a private one: set HF_TOKEN)'
    ) from e
  except errors.RevisionNotFoundError as e:
    raise ValueError(f'{source}: {repo} has no revision {revision!r}') from e
  # errors.HTTPError is httpx's or, from huggingface_hub 2 on, httpx2's.
  except (errors.HTTPError, OSError) as e:  # pyright: ignore[reportPrivateImportUsage]
    raise ValueError(
      f'{source}: not in the cache {constants.HF_HUB_CACHE} and not to be had '
      f'from {constants.ENDPOINT} ({type(e).__name__}); give a local folder '
      'instead, or copy the cache here'
    ) from e
  return pathlib.Path(folder)
