"""What will a recipe cost? Published loss gaps as data, and what of a recipe they depend on."""

from typing import TYPE_CHECKING

from narrowgauge.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.forecast.atlas import COLUMNS as COLUMNS
    from narrowgauge.forecast.atlas import Atlas as Atlas
    from narrowgauge.forecast.atlas import Point as Point
    from narrowgauge.forecast.atlas import read_atlas as read_atlas
    from narrowgauge.forecast.schemes import Scheme as Scheme
    from narrowgauge.forecast.schemes import scheme as scheme
    from narrowgauge.forecast.schemes import scheme_names as scheme_names
    from narrowgauge.forecast.traits import Traits as Traits
    from narrowgauge.forecast.traits import traits as traits
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)
