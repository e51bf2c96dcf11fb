"""What will a recipe cost? Published loss gaps as data, the law that they follow, and its forecasts."""

from typing import TYPE_CHECKING

from narrowgauge.system.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.forecast.atlas import COLUMNS as COLUMNS
    from narrowgauge.forecast.atlas import Atlas as Atlas
    from narrowgauge.forecast.atlas import Point as Point
    from narrowgauge.forecast.atlas import Scheme as Scheme
    from narrowgauge.forecast.atlas import read_atlas as read_atlas
    from narrowgauge.forecast.atlas import scheme as scheme
    from narrowgauge.forecast.atlas import scheme_names as scheme_names
    from narrowgauge.forecast.fit import Laws as Laws
    from narrowgauge.forecast.fit import fit_law as fit_law
    from narrowgauge.forecast.fit import fit_laws as fit_laws
    from narrowgauge.forecast.forecast import OWN as OWN
    from narrowgauge.forecast.forecast import Forecast as Forecast
    from narrowgauge.forecast.forecast import Forecaster as Forecaster
    from narrowgauge.forecast.hints import read_probe_file as read_probe_file
    from narrowgauge.forecast.law import Law as Law
    from narrowgauge.forecast.parts import described as described
    from narrowgauge.forecast.parts import observations as observations
    from narrowgauge.forecast.parts import tail_share as tail_share
    from narrowgauge.forecast.result import Forecasts as Forecasts
    from narrowgauge.forecast.setting import Observed as Observed
    from narrowgauge.forecast.setting import Setting as Setting
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)
