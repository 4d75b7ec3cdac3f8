"""The old name of `locater.families`; it works for one release, with a warning."""

import warnings

from locater.families import *  # noqa: F403
from locater.families import __all__ as __all__

warnings.warn("locater.heads is now locater.families", DeprecationWarning, stacklevel=2)
