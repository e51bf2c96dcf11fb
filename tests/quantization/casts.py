"""The casts of these tests: each key in the company of others."""

from narrowgauge.quantization import cast_names, make_cast

SCALED = [name for name in cast_names() if make_cast(name).is_scaled]
FOUR_OVER_SIX = {"cast": "nvfp4", "candidates": [6, 4], "choose": "mae"}
E5M3 = {"element": "e2m1", "block": 16, "scale": "e5m3"}
UNDER = E5M3 | {"tensor_scale": "tensor"}
EDEN = {"cast": "nvfp4", "correct": "projection", "scale_rounding": "stochastic", "scale_target": 256}
BY_ROW = {"cast": "nvfp4", "tensor_scale": "row"}
CENTERED = {"cast": "nvfp4", "center": "tokens"}
KEPT = {"cast": "nvfp4", "keep_channels": 0.1, "keep_cast": "mxfp8"}
E4M3_ALONE = {"element": "e2m1", "block": 16, "scale": "e4m3"}
TABLES = [
    *({"cast": name} for name in SCALED),
    *({"cast": name, "scale_rule": r} for name in ("mxfp8", "mxfp4", "mxint8") for r in ("ceil", "floor")),
    *({"cast": name, "scale_rule": "even"} for name in ("mxfp8", "mxfp4", "mxfp6-e2m3", "mxint8")),
    *({"cast": name, "power_of_two": True} for name in ("e4m3", "fp8-row", "fp4-row")),
    *({"cast": name, "rounding": "stochastic"} for name in ("e5m2", "fp8-1x128", "mxfp4", "nvfp4-2d")),
    {"cast": "mxint8", "rounding": "half-away"},
    {"cast": "e5m2fnuz", "rounding": "toward-zero"},
    {"cast": "mxfp4", "rounding": "stochastic", "random_bits": 8},
    # element, block and scale as free keys
    E5M3,
    E4M3_ALONE,
    {"element": "e2m1", "block": 32, "scale": "bf16"},
    {"element": "int4", "block": 16, "scale": "fp32"},
    {"element": "int4", "block": [16, 16], "scale": "e4m3", "tensor_scale": "tensor"},
    {"element": "e1m2", "block": 16, "scale": "e8m0"},
    {"element": "e4m3", "block": [32, 32], "scale": "e8m0"},
    {"element": "int8", "block": "row", "scale": "bf16"},
    {"element": "e4m3", "scale": "e5m3"},
    E5M3 | {"block": [3, 10]},
    # scales under others, targets, the rounding of scales, zero scales, headroom
    UNDER | {"scale_target": 2048},
    UNDER | {"tensor_scale": "row"},
    UNDER | {"block": 8, "tensor_scale": 16},
    {"element": "int4", "block": 32, "scale": "bf16", "tensor_scale": "tensor"},
    *({"cast": "nvfp4", "tensor_scale": above} for above in ("row", 32)),
    {"cast": "nvfp4", "scale_target": 256},
    *({"cast": "nvfp4", "zero_scale": zero} for zero in ("one", "smallest")),
    *(UNDER | {"zero_scale": zero} for zero in ("zero", "smallest")),
    *({"cast": "nvfp4", "headroom": by} for by in (16 / 17, 17 / 16)),
    {"cast": "fp4-row", "headroom": 0.93},
    {"cast": "mxfp4", "headroom": 16 / 17},
    E4M3_ALONE | {"headroom": 1.25},
    {"cast": "nvfp4", "scale_rounding": "stochastic"},
    UNDER | {"scale_rounding": "stochastic", "rounding": "stochastic"},
    {"element": "e2m1", "block": 16, "scale": "bf16", "scale_rounding": "stochastic"},
    E4M3_ALONE | {"scale_rounding": "toward-zero"},
    # candidates
    *(FOUR_OVER_SIX | {"choose": by} for by in ("mae", "mse", "max")),
    FOUR_OVER_SIX | {"block": [16, 16]},
    FOUR_OVER_SIX | {"block": [6, 5], "choose": "mse"},
    FOUR_OVER_SIX | {"tensor_scale": "row", "scale_target": 448},
    FOUR_OVER_SIX | {"element": "int4", "candidates": [7, 5, 3.5]},
    FOUR_OVER_SIX | {"headroom": 16 / 17, "rounding": "stochastic"},
    *(table | {"candidates": [6, 4], "choose": "mse"} for table in (E5M3, UNDER)),
    # scales corrected by the projection
    EDEN,
    EDEN | {"zero_scale": "one", "headroom": 1.012},
    EDEN | {"scale_rounding": "nearest-even"},
    EDEN | {"candidates": [6, 4], "choose": "mae"},
    E5M3 | {"block": 8, "correct": "projection"},
    # the mean taken away, and channels kept in another cast
    *(CENTERED | keys for keys in ({}, {"cast": "mxfp4"}, {"cast": "e4m3"}, {"tensor_scale": "row"})),
    CENTERED | {"center_cast": "nvfp4"},
    KEPT,
    {"cast": "e4m3", "keep_channels": 0.3, "keep_cast": "bf16"},
    KEPT | {"tensor_scale": 128, "rounding": "stochastic"},
    {"cast": "mxfp4", "center": "tokens", "keep_channels": 0.2, "keep_cast": "mxfp6-e2m3"},
    KEPT | {"candidates": [6, 4], "choose": "mae", "keep_cast": "fp32"},
    # outliers clamped
    {"cast": "fp4-row", "outliers": 0.9},
    {"cast": "nvfp4", "outliers": 0.9, "compensate": True},
]
CASTS = {str(table): make_cast(table) for table in TABLES}
