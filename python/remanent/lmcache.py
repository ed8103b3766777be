"""Alias of `remanent.integrations.lmcache`: importing it returns that module."""

import sys

from remanent.integrations import lmcache
from remanent.integrations.lmcache import *

sys.modules[__name__] = lmcache
