"""Alias of `remanent.integrations.torchtitan`. An import of this module returns that module."""

import sys

from remanent.integrations import torchtitan
from remanent.integrations.torchtitan import *

sys.modules[__name__] = torchtitan
