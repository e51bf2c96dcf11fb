"""Sizes and counts as words."""

from narrowgauge.system.units import human_bytes, human_count, signed_percent

WORDS = {
    human_count: {
        **{0: "0", 950: "950", 999.6: "1.00 k", 65_536: "65.5 k", 999_999: "1.00 M"},
        **{1.2e9: "1.20 B", 3e15: "3000 T"},
    },
    # What rounds to zero has no sign.
    signed_percent: {
        **{10.0: "+10.00 %", -0.006: "-0.01 %", -0.004: "0.00 %", 0.0049: "0.00 %", -0.0: "0.00 %"},
        float("inf"): "not finite",
    },
    human_bytes: {12: "12 bytes", 2048: "2.0 KiB", 24 * 2**30: "24.0 GiB"},
}


def test_sizes_counts_and_percents_as_words():
    for function, words in WORDS.items():
        assert {count: function(count) for count in words} == words
