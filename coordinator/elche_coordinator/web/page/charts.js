"use strict";
// A job's figures over time, by step or epoch, smoothed, in a log scale, and with another job's laid over them.

const COLORS = ["#2f7dd1", "#c8731f", "#2f9e6e", "#c2457f", "#7a5fd0", "#a08a1c", "#2aa1a8", "#c7503a", "#5b7f2e", "#8c6a4f", "#6b7a90", "#b05fb5"];
const HEIGHT = 190;
const FEW = 12; // charts of metrics that are shown at once
const TABLES = ["moments", "epochs", "evaluations"];
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800];
const RUNNING = [
  { title: "Speed of each rank, samples/s", ranks: "samples_per_s", format: tick },
  { title: "Batches between averagings", lines: [["moments", "anchor", "anchor"]], ranks: "batches", format: tick },
  { title: "Divergence: what the last round changed", ranks: "divergence", format: tick },
  { title: "Memory in use", ranks: "memory", format: bytes, incrs: Array.from({ length: 48 }, (_, power) => 2 ** power) },
  { title: "Time that averaging took", lines: [["moments", "overhead", "of the ranks' time"]], format: (value) => percent(value) },
];

let mine = {}; // table -> {at, step, epoch, figures: {name: [..]}}
let other = null; // the same, and id, of the job that this one is compared with
let plots = []; // {key, plot, figure}
let shows_all = false;

// Taking in what came.

function take_rows(message) {
  let is_new = false;
  for (const name of TABLES) {
    const news = message[name];
    if (!news) continue;
    is_new = true;
    if (news.is_whole || !mine[name]) {
      mine[name] = news;
      continue;
    }
    for (const place of ["at", "step", "epoch"]) mine[name][place].push(...news[place]);
    for (const [figure, values] of Object.entries(news.figures)) mine[name].figures[figure].push(...values);
  }
  return is_new;
}

function forget_rows() {
  mine = {};
  shows_all = false;
}

async function compare(id) {
  other = null;
  if (id) {
    try {
      const paths = [`${encodeURIComponent(id)}/series`, encodeURIComponent(id), encodeURIComponent(selected)];
      const [answer, about, own] = await Promise.all(paths.map(async (path) => (await ask(`/api/jobs/${path}`)).json()));
      if ($("other").value !== id) return; // another one has been chosen meanwhile
      other = { ...answer, differences: differences(own, about) };
    } catch (error) {
      complain(error.message);
      $("other").value = "";
    }
  }
  const has_figures = other && TABLES.some((name) => other[name]?.at.length);
  $("compared").hidden = !other;
  $("compared").textContent = !other ? "" : has_figures ? `Dashed, and “other”: ${other.id}, which ${told_state(other.state)}.` : `${other.id} has no figures.`;
  $("differences").hidden = !other || !other.differences.length;
  replace($("differences"), !other ? [] : [
    h("thead", {}, h("tr", {}, ...["Setting", selected, other.id].map((title) => h("th", { scope: "col" }, title)))),
    h("tbody", {}, ...other.differences.map(([name, ...values]) => h("tr", {}, h("th", { scope: "row" }, name), ...values.map((value) => h("td", {}, value))))),
  ]);
  show_charts();
}

// What was asked for, where two jobs differ: [name, the one's value, the other's].
function differences(one, another) {
  const [mine, others] = [one, another].map((about) => ({ file: about.file, ranks: about.asked_ranks ? String(about.asked_ranks) : "all that were free", ...about.settings }));
  const names = [...new Set([...Object.keys(mine), ...Object.keys(others)])];
  return names.filter((name) => mine[name] !== others[name]).map((name) => [name, mine[name] ?? "–", others[name] ?? "–"]);
}

const told_state = (state) => ({ succeeded: "has succeeded", failed: "has failed", cancelled: "was cancelled" })[state] || `is ${state}`;

setInterval(() => {
  if (other && !["succeeded", "failed", "cancelled"].includes(other.state)) compare(other.id);
}, 10_000);

// What there is to draw.

const has_values = (table, name) => Boolean(table?.figures[name]?.some((value) => value !== null));

function learning_charts() {
  const names = new Set();
  for (const run of [mine, other]) for (const table of ["epochs", "evaluations"]) for (const name of Object.keys(run?.[table]?.figures || {})) if (name !== "loss") names.add(name);
  const of_metric = (name) => ({ title: name, lines: [["epochs", name, "training"], ["evaluations", name, "evaluation"]], format: tick, is_free: true });
  return [
    { title: "Loss", lines: [["moments", "loss", "training"], ["epochs", "loss", "mean of the epoch"], ["evaluations", "loss", "evaluation"]], format: tick, is_free: true },
    ...[...names].map(of_metric),
    { title: "Learning rate", lines: [["moments", "learning_rate", "learning rate"]], format: tick, is_free: true, is_always: true },
  ];
}

function lines_of(chart) {
  const lines = [];
  for (const [index, [table, name, label]] of (chart.lines || []).entries()) {
    const color = chart.ranks ? css("--soft") : COLORS[index];
    if (has_values(mine[table], name)) lines.push({ run: mine, table, name, label, color, dash: chart.ranks ? [2, 3] : null });
    if (other && has_values(other[table], name)) lines.push({ run: other, table, name, label: `${label}, other`, color, dash: [7, 5] });
  }
  for (const column of chart.ranks ? Object.keys(mine.moments?.figures || {}) : []) {
    const [name, rank] = column.split("@");
    if (name === chart.ranks && rank !== undefined) lines.push({ run: mine, table: "moments", name: column, label: `rank ${rank}`, color: COLORS[rank % COLORS.length], dash: null, has_gaps: true }); // while it was lost
  }
  return lines;
}

function places(run, table, over) {
  if (over === "clock") return run[table].at;
  if (over !== "time") return run[table][over];
  const start = Math.min(...TABLES.map((name) => run[name]?.at[0] ?? Infinity));
  return run[table].at.map((at) => at - start);
}

// The rows to draw: places go up, and of several rows in one place the last one counts.
function kept_rows(xs) {
  const kept = [];
  for (let index = 0; index < xs.length; index++) {
    while (kept.length && xs[kept[kept.length - 1]] >= xs[index]) kept.pop();
    kept.push(index);
  }
  return kept;
}

function smoothed(values, weight) {
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

function data_of(lines, options) {
  const groups = new Map(); // one for each table of each run: its lines have the same places
  for (const line of lines) {
    const group = groups.get(line.run[line.table]) || { xs: places(line.run, line.table, options.over), lines: [] };
    groups.set(line.run[line.table], group);
    group.lines.push(line);
  }
  const tables = [...groups.values()].map(({ xs, lines: members }) => {
    const kept = kept_rows(xs);
    const columns = members.map(({ run, table, name }) => {
      const values = kept.map((row) => run[table].figures[name][row]);
      const drawn = options.is_log ? values.map((value) => (value > 0 ? value : null)) : values;
      return options.weight ? smoothed(drawn, options.weight) : drawn;
    });
    return [kept.map((row) => xs[row]), ...columns];
  });
  return { order: [...groups.values()].flatMap((group) => group.lines), data: tables.length === 1 ? tables[0] : uPlot.join(tables) };
}

// Drawing.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function place_label(over, value) {
  if (value === null || value === undefined) return "–";
  if (over === "clock") return clock(value);
  if (over === "time") return span(value);
  return over === "step" ? tick(value) : plain(value, 4);
}

function range_of(chart, is_log) {
  if (is_log) return (_, low, high) => (low > 0 ? [10 ** Math.floor(Math.log10(low)), 10 ** Math.max(Math.ceil(Math.log10(high)), Math.floor(Math.log10(low)) + 1)] : [0.1, 1]);
  return (_, low, high) => {
    if (low === null || low === undefined) return [0, 1];
    if (!chart.is_free) return [Math.min(0, low), high > 0 ? high * 1.05 : 1];
    const pad = 0.06 * (high - low) || Math.abs(high) * 0.1 || 1;
    return [low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad];
  };
}

// A single place would else be at the left of a whole day, of which only midnight is named.
function x_range(plot, low, high) {
  const [only, ...more] = plot.data[0];
  return only === undefined || more.length ? [low, high] : [only - 1, only + 1];
}

function new_plot(chart, lines, data, options, figure) {
  const [ink, line] = [css("--soft"), css("--line")];
  const axis = { stroke: ink, font: "11px system-ui, 'DejaVu Sans', sans-serif", grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  const series = lines.map(({ label, color, dash, has_gaps }) => ({
    label, stroke: color, width: dash ? 1.5 : 2, dash: dash || undefined, spanGaps: !has_gaps, points: { size: 4 },
    value: (_, value) => (value === null || value === undefined ? "–" : chart.format(value)),
  }));
  return new uPlot({
    width: width_of(figure), height: HEIGHT, cursor: { sync: { key: `elche ${options.over}` }, y: false },
    series: [{ label: "at", value: (_, value) => place_label(options.over, value) }, ...series],
    legend: { markers: { dash: (self, index) => (self.series[index].dash ? "dashed" : "solid") } },
    hooks: { ready: [show_last], setCursor: [(self) => has_cursor(self) || show_last(self)] },
    axes: [
      { ...axis, space: 90, size: 32, incrs: options.over === "time" ? SECONDS : undefined, values: (_, ticks) => ticks.map((one) => place_label(options.over, one)) },
      { ...axis, size: 62, incrs: chart.incrs, values: (_, ticks) => ticks.map((one) => (one === null ? "" : chart.format(one))) },
    ],
    scales: { x: { time: options.over === "clock", range: x_range }, y: { distr: options.is_log ? 3 : 1, log: 10, range: range_of(chart, options.is_log) } },
  }, data, figure);
}

const width_of = (figure) => Math.max(220, figure.clientWidth);

function show_charts() {
  const over = other && $("over").value === "clock" ? "time" : $("over").value;
  const options = { over, is_log: $("log-scale").checked, weight: Number($("smooth").value) };
  const learning = learning_charts().filter((chart) => lines_of(chart).length);
  const shown = shows_all || learning.length <= FEW + 2 ? learning : learning.filter((chart, index) => index < FEW || chart.is_always);
  $("more-charts").hidden = shown.length === learning.length;
  $("more-charts").textContent = `Show all ${learning.length} charts`;
  const running = RUNNING.filter((chart) => lines_of(chart).length);
  draw($("learning"), shown, options);
  draw($("running"), running, { ...options, is_log: false, weight: 0 });
  plots = plots.filter((one) => one.figure.isConnected || one.plot.destroy());
}

function draw(place, charts, options) {
  const known = new Map(plots.map((one) => [one.key, one]));
  const figures = charts.map((chart) => {
    const { order, data } = data_of(lines_of(chart), options);
    const key = JSON.stringify([place.id, chart.title, options.over, options.is_log, css("--line"), order.map((line) => [line.label, line.dash])]);
    return { key, chart, order, data, old: known.get(key) };
  });
  if (!figures.length) {
    if (!place.querySelector("p")) place.replaceChildren(h("p", { class: "soft" }, "No figures yet."));
    return;
  }
  if (figures.some((one) => !one.old) || place.children.length !== figures.length) {
    place.replaceChildren(...figures.map((one) => (one.old ? one.old.figure : (one.figure = h("figure", {}, h("figcaption", {}, one.chart.title))))));
  }
  for (const { key, chart, order, data, old, figure } of figures) {
    if (old) {
      old.plot.setData(data);
      if (!has_cursor(old.plot)) show_last(old.plot);
      continue;
    }
    const plot = new_plot(chart, order, data, options, figure);
    plots.push({ key, plot, figure });
  }
}

const has_cursor = (plot) => plot.cursor.idx !== null && plot.cursor.idx !== undefined;

// Without a cursor the legend says what each line has come to.
function show_last(plot) {
  const at = plot.data.map((values) => {
    let index = values.length - 1;
    while (index > 0 && (values[index] === null || values[index] === undefined)) index--;
    return index;
  });
  plot.setLegend({ idxs: at }, false);
}

function drop_charts() {
  for (const { plot, figure } of plots) {
    plot.destroy();
    figure.remove();
  }
  plots = [];
}

for (const id of ["over", "log-scale", "smooth"]) $(id).addEventListener("input", () => show_charts());
$("other").addEventListener("change", () => compare($("other").value));
$("more-charts").addEventListener("click", () => {
  shows_all = true;
  show_charts();
});
addEventListener("resize", () => plots.forEach(({ plot, figure }) => plot.setSize({ width: width_of(figure), height: HEIGHT })));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  drop_charts();
  show_charts();
});
