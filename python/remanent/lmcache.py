"""Alias of `remanent.integrations.lmcache`. An import of this module returns that module."""

import sys

from remanent.integrations import lmcache
from remanent.integrations.lmcache import *

sys.modules[__name__] = lmcache
