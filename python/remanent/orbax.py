"""Alias of `remanent.integrations.orbax`. An import of this module returns that module."""

import sys

from remanent.integrations import orbax
from remanent.integrations.orbax import *

sys.modules[__name__] = orbax
