// The difference of two runs' maps of gauges: a map again, of the steps, layers and places that both were read at.

/** Positions in two lists of what both have, in the order of the first. */
const shared = (ours, theirs) => ours.map((item, i) => [i, theirs.indexOf(item)]).filter(([, j]) => j >= 0);

/** Whether two runs have a reading of one step, layer and place in common. */
const haveCommon = (a, b) => Object.values(differenceOf(a, b).values).some((places) => Object.keys(places).length);

/** `a` less `b`, in the form of one run's readings; the histograms are those of `a`. */
function differenceOf(a, b) {
  const [steps, layers, places] = ["steps", "layers", "places"].map((list) => shared(a[list], b[list]));
  const values = {};
  for (const gauge of Object.keys(a.values)) {
    values[gauge] = {};
    for (const [i] of places) {
      const place = a.places[i], ours = a.values[gauge][place], theirs = b.values[gauge]?.[place];
      if (!ours || !theirs) continue;
      const rows = steps.map(([s, t]) => layers.map(([l, m]) => less(ours[s][l], theirs[t][m])));
      if (rows.flat().some((value) => value !== null)) values[gauge][place] = rows;
    }
  }
  const castOf = (l, m, p, q) => [...new Set([a.casts[l][p], b.casts[m][q]])].filter(Boolean).join(" and ");
  const at = (list, old) => list.findIndex(([i]) => i === old);
  const moved = a.histograms.map((h) => ({ ...h, at: [at(steps, h.at[0]), at(layers, h.at[1]), at(places, h.at[2])] }));
  return {
    run: a.run, other: b.run, values,
    steps: steps.map(([i]) => a.steps[i]), layers: layers.map(([i]) => a.layers[i]), places: places.map(([i]) => a.places[i]),
    casts: layers.map(([l, m]) => places.map(([p, q]) => castOf(l, m, p, q))),
    histograms: moved.filter((h) => !h.at.includes(-1)),
  };
}

const less = (ours, theirs) => (ours === null || theirs === null ? null : Number((ours - theirs).toPrecision(6)));

/** The reach of a difference: the widest on both sides of zero. What is better has a negative share. */
function reachOfDifference(gauge, data) {
  const sizes = Object.values(data.values[gauge]).flat(2).filter((value) => value !== null).map(Math.abs);
  const high = Math.max(...sizes, 0) || 1;
  const full = GAUGES[gauge].down ? -high : high;
  return { pale: -full, full, share: (value) => value / full };
}
