"""Computes the tables and the figure; exit status 1 if a claim fails."""

import pathlib

from experiments.leviathan_analytic import run as analytic
from experiments.tpu_roofline import figures, table
from specdec_jax import program

HOME = pathlib.Path(__file__).parent


def run(workdir: str = '') -> bool:
  return analytic.run(workdir, HOME, table.TABLES, figures.FIGURES)


if __name__ == '__main__':
  program.launch(lambda: run(analytic.WORKDIR.value))
