"""Alias of `remanent.integrations.orbax`: importing it returns that module."""

import sys

from remanent.integrations import orbax
from remanent.integrations.orbax import *

sys.modules[__name__] = orbax
