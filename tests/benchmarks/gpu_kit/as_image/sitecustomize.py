"""Imported by Python at its start if this folder is in PYTHONPATH: see hidden_modules.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from hidden_modules import hide

sys.path.pop(0)
hide()
