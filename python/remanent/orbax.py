"""Alias of `remanent.integrations.orbax`. Importing this module returns that one."""

import sys

from remanent.integrations import orbax
from remanent.integrations.orbax import *

sys.modules[__name__] = orbax
