"""Alias of `remanent.integrations.lmcache`. Importing this module returns that one."""

import sys

from remanent.integrations import lmcache
from remanent.integrations.lmcache import *

sys.modules[__name__] = lmcache
