"""The page of `served`: what a server computes of a run, and where it departs from it."""

from html import escape

from narrowgauge.report.page.plain_page import html_table, plain_page
from narrowgauge.runs.use.served import HEAD, Served

_LAYERS = ("layer", "weight", "output, inputs as in training", "output, wide inputs", "")
_PASSES = (
    "<p>Losses in nats per token. <em>trainer</em> is the run under its recipe, <em>file</em> the exported "
    "weights in float32. KL divergence and log-probabilities are over the whole vocabulary.</p>"
)
_ALONE = "<p>The server's layers against the trainer's on the server's input, relative in the norm.</p>"


def served_page(found: Served) -> str:
    """The page as a string of HTML."""
    title = f"Server and trainer: {found.verdict}"
    parts = [f"<h1>{title}</h1>", f"<p>{escape(found.subject())}</p>"]
    parts += [html_table(HEAD, found.rows(), ("",))]
    parts += ["<ul>", *(f"<li>{escape(line)}</li>" for line in found.sentences()), "</ul>"]
    parts.append(_PASSES)
    if found.layers:
        rows = []
        for layer in found.layers:
            note = "another weight" if layer.has_other_weight else "disagrees" if layer.disagrees else ""
            weight = "codes" if layer.weight is None else f"{layer.weight:.2g}"
            rows.append((layer.name, weight, f"{layer.trainer:.2g}", f"{layer.wide:.2g}", note))
        parts += ["<h2>Layers</h2>", _ALONE]
        parts.append(html_table(_LAYERS, rows, ("layer", "")))
    return plain_page(title, parts)
