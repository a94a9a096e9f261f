"use strict";
// The coordinator's page. One stream of server-sent events, read with fetch so that a token goes in a header.

const $ = (id) => document.getElementById(id);
const COLORS = ["#2f7dd1", "#d9822b", "#2f9e6e", "#c2457f", "#7a5fd0", "#a08a1c", "#2aa1a8", "#c7503a", "#5b7f2e", "#8c6a4f", "#6b7a90", "#b05fb5"];
const MAX_POINTS = 1200;
let selected = "";
let reading = null; // AbortController of the stream
let charts = null;
let points = null; // {at, job: {name: [..]}, ranks: {rank: {name: [..]}}}
let happenings = [];

// Making elements: text never becomes markup.

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// Numbers with units.

const plain = (value, digits = 3) => (value === null || value === undefined ? "–" : Number(value).toLocaleString("en", { maximumSignificantDigits: digits }));
const percent = (value, digits = 1) => `${(100 * value).toFixed(digits)} %`;
const ms = (value) => (!value ? "–" : value < 1000 ? `${plain(value)} ms` : `${plain(value / 1000)} s`);
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
function bytes(value) {
  if (value === 0) return "0";
  if (!value) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  return `${plain(value / 2 ** (10 * power))} ${units[power]}`;
}
function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

// Talking to the coordinator.

const token = () => sessionStorage.getItem("elche-token") || "";
const headers = (more = {}) => (token() ? { authorization: `Bearer ${token()}`, ...more } : more);

async function ask(path, method = "GET") {
  const more = method === "POST" ? { "content-type": "application/json" } : {};
  const response = await fetch(path, { method, headers: headers(more), body: method === "POST" ? "{}" : undefined });
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  throw new Error(told.error || `the coordinator answered ${response.status}`);
}

async function act(path, question) {
  if (question && !(await sure(question))) return;
  try {
    await ask(path, "POST");
  } catch (error) {
    say(error.message);
  }
}

function sure(question) {
  $("sure-text").textContent = question;
  $("sure").returnValue = "no";
  $("sure").showModal();
  return new Promise((resolve) => $("sure").addEventListener("close", () => resolve($("sure").returnValue === "yes"), { once: true }));
}

function say(text) {
  $("connection").textContent = text;
  $("connection").hidden = !text;
}

async function read() {
  if (reading) reading.abort();
  const mine = (reading = new AbortController());
  while (!mine.signal.aborted) {
    try {
      const response = await fetch(`/api/stream?job=${encodeURIComponent(selected)}`, { headers: headers(), signal: mine.signal });
      if (response.status === 401) return close_door(token() ? "That is not the coordinator's token." : "");
      if (!response.ok) throw new Error(`the coordinator answered ${response.status}`);
      open_door();
      points = null;
      happenings = [];
      await messages(response.body, mine.signal);
      throw new Error("the stream has ended");
    } catch (error) {
      if (mine.signal.aborted) return;
      say("The coordinator does not answer; trying again …");
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
}

async function messages(body, signal) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (true) {
    const { done, value } = await reader.read();
    if (done || signal.aborted) return;
    text += value;
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      show(JSON.parse(text.slice("data: ".length, end)));
      text = text.slice(end + 2);
    }
  }
}

function close_door(error) {
  sessionStorage.removeItem("elche-token");
  $("door").hidden = false;
  $("house").hidden = true;
  $("door-error").textContent = error;
  $("token").focus();
}

function open_door() {
  $("door").hidden = true;
  $("house").hidden = false;
  say("");
}

// Showing what came.

function show(message) {
  const started = performance.now();
  show_jobs(message.jobs);
  show_hosts(message.agents);
  if (!selected && message.jobs.length) {
    location.replace(`#job=${encodeURIComponent(message.jobs[0].id)}`);
    return;
  }
  $("nothing").hidden = Boolean(message.job);
  if (message.jobs.length) $("nothing").textContent = selected ? `There is no job ${selected}.` : "";
  $("job").hidden = !message.job;
  if (message.job) {
    show_job(message.job);
    take_points(message.series);
    take_happenings(message.happenings);
    show_charts(message.job);
  }
  document.documentElement.dataset.updateMs = (performance.now() - started).toFixed(1);
  document.documentElement.dataset.updates = Number(document.documentElement.dataset.updates || 0) + 1;
}

const tone = (state) => ({ succeeded: "good", training: "good", failed: "bad", cancelled: "warn", paused: "warn" })[state] || "soft";

function show_jobs(jobs) {
  const items = jobs.map((job) =>
    h("li", {},
      h("a", { href: `#job=${encodeURIComponent(job.id)}`, "aria-current": job.id === selected ? "true" : "false" },
        h("span", { class: "row" }, h("strong", {}, job.id), h("span", { class: tone(job.state) }, job.state)),
        h("span", { class: "row soft" },
          h("span", {}, job.epochs ? `epoch ${Math.min(job.epoch + 1, job.epochs)} of ${job.epochs}` : `${job.ranks} ranks`),
          h("span", {}, job.state === "training" && job.eta_s !== null ? span(job.eta_s) : "")),
        h("span", { class: "bar", role: "progressbar", "aria-label": "progress", "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": Math.round(100 * job.progress) },
          h("i", { style: `width:${(100 * job.progress).toFixed(1)}%` })))));
  keep_focus($("jobs"), items);
  const running = jobs.filter((job) => job.state === "training").length;
  $("cluster").dataset.jobs = `${running} of ${jobs.length} jobs train`;
}

function keep_focus(list, items) {
  const at = [...list.querySelectorAll("a, button")].indexOf(document.activeElement);
  list.replaceChildren(...items);
  if (at >= 0) list.querySelectorAll("a, button")[at]?.focus({ preventScroll: true });
}

function show_hosts(agents) {
  const items = agents.map((agent) => {
    const verb = agent.drained ? "undrain" : "drain";
    return h("li", { class: "host" },
      h("span", {}, h("strong", {}, agent.host), h("br"), h("span", { class: "soft" }, `${agent.busy} of ${agent.slots.length} slots busy${agent.drained ? ", drained" : ""}`)),
      h("button", { title: agent.drained ? "Give it ranks again" : "Give it no more ranks", onclick: () => act(`/api/agents/${agent.id}/${verb}`) }, agent.drained ? "Use" : "Drain"));
  });
  keep_focus($("hosts"), items.length ? items : [h("li", { class: "soft" }, "No host attends.")]);
  const slots = agents.reduce((sum, agent) => sum + agent.slots.length, 0);
  const busy = agents.reduce((sum, agent) => sum + agent.busy, 0);
  $("cluster").textContent = `${$("cluster").dataset.jobs || ""} · ${agents.length} hosts · ${busy} of ${slots} slots busy`;
}

function show_job(job) {
  const path = `/api/jobs/${encodeURIComponent(job.id)}`;
  document.title = `${job.id} · elche`;
  $("name").textContent = job.id;
  const state = h("strong", { class: tone(job.state) }, job.state);
  $("state").replaceChildren(state, job.reason && job.reason !== "trains" ? ` – ${job.reason}` : "");
  const trains = job.state === "training";
  const paused = job.state === "paused";
  keep_focus($("actions"), [
    h("button", { disabled: trains || paused ? null : "", onclick: () => act(`${path}/${paused ? "unpause" : "pause"}`) }, paused ? "Go on" : "Pause"),
    h("button", { disabled: trains ? null : "", onclick: () => act(`${path}/checkpoint`) }, "Checkpoint"),
    h("button", { class: "danger", disabled: job.ended ? "" : null, onclick: () => act(`${path}/cancel`, `Cancel ${job.id}?`) }, "Cancel"),
  ]);
  show_answers(job);
  show_ranks(job, path);
  $("checkpoints").replaceChildren(...(job.checkpoints.length ? [...job.checkpoints].reverse().map((one) =>
    h("li", {}, `version ${one.version}, epoch ${one.epoch}, ${bytes(one.size_bytes)}, written in ${span(one.duration_s)}${one.is_best ? ", the best" : ""}: `, h("code", {}, one.path))) : [h("li", { class: "soft" }, "None yet.")]));
}

function show_answers(job) {
  const answer = (question, text, more, kind = "") => h("div", {}, h("dt", {}, question), h("dd", { class: `big ${kind}` }, text), h("dd", { class: "soft" }, more || " "));
  const spread = job.spread;
  const slow = !spread ? answer("Which rank is slowest?", "–", "no batch yet")
    : job.ranks < 2 ? answer("How fast?", `${ms(spread.ms)} a batch`, spread.device)
    : answer("Which rank is slowest?", `rank ${spread.rank}, by ${plain(spread.ratio, 2)} times`, `${ms(spread.ms)} a batch on ${spread.host} (${spread.device}); the fastest is ${plain(spread.ratio, 2)} times as fast`);
  const hurts = job.overhead > 0.1 ? "warn" : "good";
  const averaging = answer("Is averaging hurting?", job.rounds ? `${percent(job.overhead)} of the time` : "–", job.rounds ? `${hurts === "good" ? "no" : "yes"}: a round every ${ms(1000 * job.round_s)}, averaging ${ms(1000 * job.averaging_s)}; divergence ${spread ? plain(spread.divergence, 2) : "–"}` : "", job.rounds ? hurts : "");
  const left = job.ended ? answer("When will it end?", job.state, job.reason) : answer("When will it end?", job.state === "paused" ? "paused" : job.eta_s === null ? "–" : `in ${span(job.eta_s)}`, job.eta_s === null ? job.pacing : `at ${clock(Date.now() / 1000 + job.eta_s)}`);
  const figures = Object.entries(job.metrics).map(([name, value]) => `${name} ${plain(value, 4)}`).join(", ");
  const far = answer("How far is it?", `${percent(job.progress, 0)}, epoch ${Math.min(job.epoch + 1, job.epochs)} of ${job.epochs}`, `loss ${plain(job.loss, 4)}${figures ? `, ${figures}` : ""}; ${plain(job.samples_per_s)} samples/s`);
  $("answers").replaceChildren(slow, averaging, left, far);
}

const COLUMNS = ["Rank", "Host", "Device", "State", "Batch", "Samples/s", "Share", "Round", "Waits: round", "data", "limit", "Divergence", "Memory", "GPU", ""];

function show_ranks(job, path) {
  const head = h("thead", {}, h("tr", {}, ...COLUMNS.map((name) => h("th", { scope: "col" }, name))));
  const rows = job.table.map((rank) => {
    const all = rank.compute_s + rank.waited_s + rank.data_wait_s + rank.throttled_s || 1;
    const gpu = rank.gpu === null ? "–" : `${percent(rank.gpu, 0)}${rank.celsius ? `, ${Math.round(rank.celsius)} °C` : ""}${rank.watts ? `, ${Math.round(rank.watts)} W` : ""}`;
    const cells = [rank.rank, rank.host, rank.device, rank.state, ms(rank.ms), plain(rank.samples_per_s),
      h("span", {}, h("span", { class: "share" }, h("i", { style: `width:${(100 * rank.share).toFixed(0)}%` })), percent(rank.share, 0)),
      rank.target ? `${rank.made} of ${rank.target}` : rank.made, percent(rank.waited_s / all), percent(rank.data_wait_s / all), percent(rank.throttled_s / all),
      plain(rank.divergence, 2), h("span", { title: `of ${bytes(rank.memory_total)}` }, bytes(rank.memory)), gpu,
      h("button", { onclick: () => show_log(path, rank.rank), "aria-label": `Log of rank ${rank.rank}` }, "Log")];
    return h("tr", { class: job.spread && job.ranks > 1 && rank.rank === job.spread.rank ? "slowest" : null }, ...cells.map((cell) => h("td", {}, cell instanceof Node ? cell : String(cell))));
  });
  const at = [...$("ranks").querySelectorAll("button")].indexOf(document.activeElement);
  $("ranks").replaceChildren(head, h("tbody", {}, ...rows));
  if (at >= 0) $("ranks").querySelectorAll("button")[at]?.focus({ preventScroll: true });
  $("hidden-ranks").textContent = job.num_ranks_hidden ? `The slowest ${job.table.length} ranks; ${job.num_ranks_hidden} faster ones are not shown.` : "";
}

async function show_log(path, rank) {
  $("log-title").textContent = `Log of rank ${rank}`;
  $("log-text").textContent = "…";
  $("log").showModal();
  try {
    $("log-text").textContent = (await (await ask(`${path}/log/${rank}`)).text()) || "It is empty.";
    $("log-text").scrollTop = $("log-text").scrollHeight;
  } catch (error) {
    $("log-text").textContent = error.message;
  }
}

// What happened.

function take_happenings(news) {
  if (!news.length && happenings.length) return;
  happenings = [...happenings, ...news].slice(-500);
  list_happenings();
}

function list_happenings() {
  const wanted = $("filter").value.trim().toLowerCase();
  const found = happenings.filter((one) => !wanted || clock(one.at).startsWith(wanted) || one.text.toLowerCase().includes(wanted));
  $("events").replaceChildren(...found.slice(-200).reverse().map((one) =>
    h("li", { class: one.kind }, h("time", { datetime: new Date(one.at * 1000).toISOString(), title: new Date(one.at * 1000).toLocaleString() }, clock(one.at)), h("span", {}, one.text))));
}

// Charts.

function take_points(news) {
  if (!points || news.is_whole) {
    points = news;
    drop_charts();
    return;
  }
  points.at.push(...news.at);
  for (const [name, values] of Object.entries(news.job)) points.job[name].push(...values);
  for (const [rank, figures] of Object.entries(news.ranks)) for (const [name, values] of Object.entries(figures)) points.ranks[rank][name].push(...values);
  const extra = points.at.length - MAX_POINTS;
  if (extra > 0) for (const values of [points.at, ...Object.values(points.job), ...Object.values(points.ranks).flatMap(Object.values)]) values.splice(0, extra);
}

const CHARTS = [
  { title: "Training loss", job: "loss", format: (value) => plain(value, 4) },
  { title: "Speed of each rank, samples/s", rank: "samples_per_s", format: (value) => plain(value) },
  { title: "Batches between averagings: El Che's anchor, and each rank", job: "anchor", label: "anchor", rank: "batches", format: (value) => plain(value) },
  { title: "Divergence: what the last round changed, relative", rank: "divergence", format: (value) => plain(value, 2) },
  { title: "Memory in use", rank: "memory", format: bytes },
  { title: "Time that averaging took, %", job: "overhead", format: (value) => (value === null ? "–" : percent(value)) },
];

function drop_charts() {
  for (const { plot } of charts || []) plot.destroy();
  charts = null;
}

function data_of(chart) {
  const columns = [points.at];
  if (chart.job) columns.push(points.job[chart.job]);
  if (chart.rank) for (const figures of Object.values(points.ranks)) columns.push(figures[chart.rank]);
  return columns;
}

function show_charts(job) {
  if (!charts) {
    const ink = getComputedStyle(document.documentElement).getPropertyValue("--soft");
    const line = getComputedStyle(document.documentElement).getPropertyValue("--line");
    charts = CHARTS.map((chart) => {
      const figure = h("figure", {}, h("figcaption", {}, chart.title));
      $("charts").append(figure);
      return { chart, figure, plot: null };
    });
    $("charts").replaceChildren(...charts.map((one) => one.figure));
    for (const one of charts) {
      const { chart, figure } = one;
      const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
      const series = [{ value: (_, value) => (value === null ? "–" : clock(value)), label: "at" }];
      if (chart.job) series.push({ label: chart.label || chart.job, stroke: chart.rank ? ink : COLORS[0], width: 2, dash: chart.rank ? [6, 4] : undefined, spanGaps: true, value: (_, value) => chart.format(value) });
      if (chart.rank) for (const rank of Object.keys(points.ranks)) series.push({ label: `rank ${rank}`, stroke: COLORS[rank % COLORS.length], width: 1.5, spanGaps: true, value: (_, value) => chart.format(value) });
      const options = {
        width: Math.max(240, figure.clientWidth), height: 180, series, cursor: { sync: { key: "elche" } },
        axes: [{ ...axis, values: (_, ticks) => ticks.map((tick) => clock(tick)), space: 80 }, { ...axis, size: 64, values: (_, ticks) => ticks.map(chart.format) }],
        scales: { y: { range: (_, low, high) => [Math.min(0, low ?? 0), high > 0 ? high * 1.05 : 1] } },
      };
      one.plot = new uPlot(options, data_of(chart), figure);
    }
    return;
  }
  for (const { chart, plot } of charts) {
    plot.setData(data_of(chart));
    if (plot.cursor.idx === null || plot.cursor.idx === undefined) plot.setLegend({ idx: points.at.length - 1 });
  }
}

addEventListener("resize", () => charts?.forEach(({ plot, figure }) => plot.setSize({ width: Math.max(240, figure.clientWidth), height: 180 })));

// From the address to a job.

function select() {
  let wanted = location.hash.replace(/^#(job=)?/, "");
  try {
    wanted = decodeURIComponent(wanted);
  } catch {
    // it is taken as it stands
  }
  if (wanted === selected && reading) return;
  selected = wanted;
  drop_charts();
  read();
}

$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("elche-token", $("token").value.trim());
  $("token").value = "";
  read();
});
$("filter").addEventListener("input", list_happenings);
addEventListener("hashchange", select);
select();
