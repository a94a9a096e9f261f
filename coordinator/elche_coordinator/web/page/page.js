"use strict";
// The coordinator's page. One stream of server-sent events, read with fetch so that a token goes in a header.

const $ = (id) => document.getElementById(id);
const NARROW = matchMedia("(max-width: 50rem)");
let selected = ""; // the job
let at_hosts = false;
let reading = null; // AbortController of the stream
let latest = {}; // every part of what came, as it was last told
let events = [];
const wanted = { text: "", state: "", page: 0, host_text: "", host_page: 0 };

// Making elements: text never becomes markup.

const TURNS = /[\u202a-\u202e\u2066-\u2069]/g; // turn the text after them around, such as the next metric's digits

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  const there = children.filter((child) => child !== null && child !== undefined);
  element.append(...there.map((child) => (typeof child === "string" ? child.replace(TURNS, " ") : child)));
  return element;
}

// Numbers with units.

const plain = (value, digits = 3) => (value === null || value === undefined ? "–" : Number(value).toLocaleString("en", { maximumSignificantDigits: digits }));
const percent = (value, digits = 1) => `${(100 * value).toFixed(digits)} %`;
const ms = (value) => (!value ? "–" : value < 1000 ? `${plain(value)} ms` : `${plain(value / 1000)} s`);
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
const is_today = (seconds) => new Date(seconds * 1000).toDateString() === new Date().toDateString();
const day = (seconds) => new Date(seconds * 1000).toLocaleDateString([], { day: "numeric", month: "short", year: "numeric" });
const when = (seconds) => (!seconds ? "–" : is_today(seconds) ? clock(seconds) : `${day(seconds)}, ${clock(seconds)}`);
const plural = (number, what) => `${plain(number, 9)} ${what}${number === 1 ? "" : "s"}`;
function tick(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return Number(value).toLocaleString("en", size >= 1e5 ? { notation: "compact", maximumSignificantDigits: 4 } : { maximumSignificantDigits: 5 });
}
function bytes(value) {
  if (value === 0) return "0";
  if (!value) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.max(0, Math.min(units.length - 1, Math.floor(Math.log2(value) / 10)));
  return `${plain(value / 2 ** (10 * power))} ${units[power]}`;
}
function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${plain(seconds, 2)} s`;
  const rounded = Math.round(seconds);
  const parts = (big, one, small, other) => `${big} ${one}${small ? ` ${small} ${other}` : ""}`;
  if (rounded < 60) return `${rounded} s`;
  if (rounded < 3600) return parts(Math.floor(rounded / 60), "min", rounded % 60, "s");
  const minutes = Math.round(rounded / 60);
  if (minutes < 2880) return parts(Math.floor(minutes / 60), "h", minutes % 60, "min");
  return parts(Math.floor(minutes / 1440), "days", Math.round((minutes % 1440) / 60), "h");
}

// Talking to the coordinator.

// `elche run` shows an address that has the run's own token behind the #, which a browser sends to nobody.
if (location.hash.startsWith("#token=")) {
  sessionStorage.setItem("elche-token", decodeURIComponent(location.hash.slice("#token=".length)));
  history.replaceState(null, "", location.pathname + location.search);
}
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
    return await (await ask(path, "POST")).json();
  } catch (error) {
    complain(error.message);
    return null;
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

// For as long as it takes to be read.
function complain(text) {
  say(text);
  setTimeout(() => $("connection").textContent === text && say(""), 10_000);
}

async function read() {
  if (reading) reading.abort();
  const mine = (reading = new AbortController());
  while (!mine.signal.aborted) {
    try {
      const response = await fetch(`/api/stream?${new URLSearchParams({ job: selected, ...wanted })}`, { headers: headers(), signal: mine.signal });
      if (response.status === 401) return close_door(token() ? "That is not the coordinator's token." : "");
      if (!response.ok) throw new Error(`the coordinator answered ${response.status}`);
      open_door();
      latest = {};
      events = [];
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
  const is_first = !Object.keys(latest).length;
  Object.assign(latest, message);
  $("visitor").hidden = !token();
  $("you").textContent = latest.you || "";
  if (message.jobs) show_jobs(latest.jobs);
  if (message.hosts) show_hosts(latest.hosts);
  if (message.jobs || message.hosts) show_cluster(latest.jobs, latest.hosts);
  if (!selected && !at_hosts && latest.jobs.items.length) return location.replace(`#job=${encodeURIComponent(latest.jobs.items[0].id)}`);
  show_parts();
  if (latest.job && !at_hosts) {
    if (is_first) forget_rows();
    if (message.job || message.about) show_job(latest.job, latest.about || {});
    if (message.events || is_first) take_events(message.events || []);
    if (take_rows(message) || is_first) show_charts();
  }
  document.documentElement.dataset.updateMs = (performance.now() - started).toFixed(1);
  document.documentElement.dataset.updates = Number(document.documentElement.dataset.updates || 0) + 1;
}

function show_parts() {
  const has_job = Boolean(latest.job) && !at_hosts;
  $("hosts-view").hidden = !at_hosts;
  $("job").hidden = !has_job;
  $("nothing").hidden = at_hosts || has_job || !latest.jobs;
  $("nothing").replaceChildren(...(selected ? [`There is no job ${selected}.`] : ["No job yet. Submit one: ", h("code", {}, "elche submit train.py")]));
  $("to-jobs").setAttribute("aria-current", at_hosts ? "false" : "page");
  $("to-hosts").setAttribute("aria-current", at_hosts ? "page" : "false");
}

const tone = (state) => ({ succeeded: "good", training: "good", failed: "bad", cancelled: "warn", paused: "warn", stalled: "bad", leaving: "warn", evaluating: "good", averaging: "good" })[state] || "soft";

// The list of jobs, and that of hosts.

const STATES = { "": "All", open: "Not ended", succeeded: "Succeeded", failed: "Failed", cancelled: "Cancelled" };

function show_jobs(list) {
  const items = list.items.map((job) =>
    h("li", {},
      h("a", { href: `#job=${encodeURIComponent(job.id)}`, "aria-current": job.id === selected ? "true" : "false" },
        h("span", { class: "row" }, h("strong", {}, job.id), h("span", { class: job.num_stalled ? "bad" : tone(job.state) }, job.num_stalled ? "stalled" : job.state)),
        h("span", { class: "row soft" }, h("span", {}, progress_of(job)), h("span", {}, job.state === "training" && job.eta_s !== null && !job.num_stalled ? `${span(job.eta_s)} left` : !job.submitted_at ? "" : is_today(job.submitted_at) ? clock(job.submitted_at).slice(0, 5) : day(job.submitted_at))),
        h("span", { class: "bar", role: "progressbar", "aria-label": `progress of ${job.id}`, "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": Math.round(100 * job.progress) },
          h("i", { style: `width:${(100 * job.progress).toFixed(1)}%` })))));
  replace($("jobs"), items.length ? items : [h("li", { class: "soft" }, list.num_all ? "No job matches." : "No job yet.")]);
  $("num-jobs").textContent = list.num_all ? `${list.num === list.num_all ? "" : `${list.num} of `}${list.num_all}` : "";
  const options = Object.entries(STATES).map(([state, text]) => `${text} (${state ? list.counts[state] : Object.values(list.counts).reduce((sum, one) => sum + one, 0)})`);
  if ($("of-state").children.length !== options.length) $("of-state").replaceChildren(...Object.keys(STATES).map((state) => h("option", { value: state })));
  options.forEach((text, index) => ($("of-state").children[index].textContent = text));
  show_pager($("jobs-pager"), list, "Newer", "Older", (page) => (wanted.page = page));
  show_others(list.items);
}

const progress_of = (job) => (job.epochs ? `epoch ${Math.min(job.epoch + 1, job.epochs)} of ${job.epochs}` : job.ranks ? plural(job.ranks, "rank") : job.state === "queued" ? "waits" : "");

function show_others(jobs) {
  const ids = jobs.map((job) => job.id).filter((id) => id !== selected);
  const chosen = $("other").value;
  if (chosen && !ids.includes(chosen)) ids.push(chosen);
  const known = [...$("other").options].map((option) => option.value).filter(Boolean);
  if (ids.join() === known.join() || document.activeElement === $("other")) return;
  $("other").replaceChildren(h("option", { value: "" }, "no other"), ...ids.map((id) => h("option", { value: id }, id)));
  $("other").value = chosen;
}

function show_pager(place, list, before, after, turn) {
  place.hidden = list.pages < 2;
  const go = (page) => () => {
    turn(page);
    read();
  };
  replace(place, [
    h("button", { type: "button", disabled: list.page > 0 ? null : "", onclick: go(list.page - 1) }, before),
    h("span", { class: "soft" }, `${list.page + 1} of ${list.pages}`),
    h("button", { type: "button", disabled: list.page + 1 < list.pages ? null : "", onclick: go(list.page + 1) }, after),
  ]);
}

// Replaces what a list holds; the focus stays at its place. A button that is replaced between press and release is not
// clicked, so while one is pressed the list waits.
const waiting = new Map(); // a list that is pressed -> the timer that replaces what it holds
function replace(list, items) {
  clearTimeout(waiting.get(list));
  if (list.querySelector(":active")) {
    waiting.set(list, setTimeout(() => replace(list, items), 50));
    return;
  }
  const at = [...list.querySelectorAll("a, button")].indexOf(document.activeElement);
  list.replaceChildren(...items);
  if (at >= 0) list.querySelectorAll("a, button")[at]?.focus({ preventScroll: true });
}

function show_hosts(list) {
  const items = list.items.map((host) => {
    const name = host.is_namesake ? `${host.host} (${host.id})` : host.host;
    const slots = host.slots.map((slot) => h("li", {}, h("span", { class: "device" }, slot.device), slot.job === null ? h("span", { class: "soft" }, "free") : h("a", { href: `#job=${encodeURIComponent(slot.job)}` }, `${slot.job}, rank ${slot.rank}`)));
    if (host.num_slots > host.slots.length) slots.push(h("li", { class: "soft" }, `and ${host.num_slots - host.slots.length} more`));
    return h("li", { class: "card host" },
      h("div", { class: "row" },
        h("div", {}, h("h3", {}, host.host, " ", h("span", { class: "soft" }, host.id)), h("p", { class: host.drained || host.problem ? "warn" : "soft" }, `${host.busy} of ${plural(host.num_slots, "slot")} busy${host.drained ? ", drained: it gets no more ranks" : host.problem ? `, it can start no ranks: ${host.problem}` : ""}`)),
        h("button", { type: "button", "aria-label": `${host.drained ? "Use" : "Drain"} ${name}`, title: host.drained ? "Give it ranks again" : "Give it no more ranks", onclick: () => act(`/api/agents/${encodeURIComponent(host.id)}/${host.drained ? "undrain" : "drain"}`) }, host.drained ? "Use" : "Drain")),
      h("ul", { class: "slots" }, ...slots));
  });
  const none = list.num_all ? "No host matches." : "No worker is connected. Start one: elche-worker --coordinator HOST:PORT";
  replace($("hosts"), items.length ? items : [h("li", { class: "soft" }, none)]);
  show_pager($("hosts-pager"), list, "Before", "Next", (page) => (wanted.host_page = page));
}

function show_cluster(jobs, hosts) {
  $("to-hosts").textContent = `Hosts (${hosts.num_all})`;
  $("cluster").textContent = `${jobs.num_training} of ${plural(jobs.num_all, "job")} training · ${hosts.num_busy} of ${plural(hosts.num_slots, "slot")} busy`;
}

// One job.

function show_job(job, about) {
  const path = `/api/jobs/${encodeURIComponent(job.id)}`;
  document.title = `${job.id} · ${job.state} · elche`;
  $("name").textContent = job.id;
  const stalled = !job.num_stalled ? "" : job.num_stalled === job.ranks ? ", stalled" : `, ${plural(job.num_stalled, "rank")} stalled`;
  const state = h("strong", { class: stalled ? "bad" : tone(job.state) }, job.state + stalled);
  const why = job.reason && !["trains", job.state].includes(job.reason) && !job.ended ? ` – ${job.reason}` : "";
  $("state").replaceChildren(state, why, h("span", { class: "soft" }, ` · ${[job.ranks ? plural(job.ranks, "rank") : "", job.policy, job.submitted_at ? `submitted ${when(job.submitted_at)}` : ""].filter(Boolean).join(" · ")}`));
  show_actions(job, about, path);
  show_outcome(job, about, path);
  show_answers(job, about);
  show_ranks(job, about, path);
  show_about(job, about);
  show_checkpoints(job);
}

function show_actions(job, about, path) {
  const [trains, paused] = [job.state === "training" || job.state === "waiting", job.state === "paused"];
  const button = (text, action, is_off = false, kind = null) => h("button", { type: "button", class: kind, disabled: is_off ? "" : null, onclick: action }, text);
  replace($("actions"), job.ended
    ? [
        about.can_resume ? button("Resume", () => resume(path), false, about.outcome === "succeeded" ? null : "main") : null,
        about.model ? button("Download model", () => download(path), false, "main") : null,
      ].filter(Boolean)
    : [
        button(paused ? "Go on" : "Pause", () => act(`${path}/${paused ? "unpause" : "pause"}`), !trains && !paused),
        button("Checkpoint", () => act(`${path}/checkpoint`), !trains),
        ...(about.num_wanted ? [
          button("Fewer ranks", () => act(`${path}/scale?ranks=${about.num_wanted - 1}`), about.num_wanted < 2),
          h("span", { class: "soft" }, `${about.num_wanted} wanted`),
          button("More ranks", () => act(`${path}/scale?ranks=${about.num_wanted + 1}`)),
        ] : []),
        button("Cancel", () => act(`${path}/cancel`, `Cancel ${job.id}?`), false, "danger"),
      ]);
}

async function resume(path) {
  const answer = await act(`${path}/resume`);
  if (answer) location.hash = `#job=${encodeURIComponent(answer.job)}`;
}

// A browser's own download goes to disk as it comes, however large, and shows how far it is; but it sends no token. So
// the page asks, with the token, for a link that works once.
async function download(path, what = "model") {
  const answer = await act(`${path}/${what}`);
  if (answer) h("a", { href: answer.link, download: "" }).click();
}

function show_outcome(job, about, path) {
  $("outcome").hidden = !about.outcome;
  $("outcome").className = `outcome ${tone(about.outcome)}-edge`;
  const key = JSON.stringify([job.id, about]);
  if (!about.outcome || $("outcome").dataset.key === key) return;
  $("outcome").dataset.key = key;
  const parts = about.outcome === "failed" ? failure(job, about, path) : about.outcome === "succeeded" ? success(job, about) : [h("h3", { class: "warn" }, "Cancelled"), h("p", {}, about.error || "by request")];
  if (about.artifacts) parts.push(h("p", { class: "soft" }, `Artifacts: ${about.artifacts}`));
  $("outcome").replaceChildren(...parts.filter(Boolean));
}

function failure(job, about, path) {
  const is_python = about.traceback.startsWith("Traceback");
  const rank = about.failed_rank;
  const log = h("pre", { hidden: "", tabindex: "0" });
  const log_title = h("h4", { hidden: "" }, `Output of rank ${rank} before it failed`);
  if (is_python && rank !== null) end_of_log(path, rank, log, log_title);
  return [
    h("h3", { class: "bad" }, rank === null ? "Failed" : `Failed on rank ${rank}`),
    h("p", { class: "big" }, about.error),
    about.traceback ? h("h4", {}, is_python ? "Traceback" : "Last lines of its log") : null,
    about.traceback ? h("pre", { tabindex: "0" }, about.traceback.trimEnd()) : null,
    log_title, log,
    h("p", { class: "soft" }, about.can_resume ? "Resume starts a new job from the last checkpoint." : about.is_loop ? "It is a script with its own loop: start the script again." : "It has no checkpoint to resume from."),
  ];
}

async function end_of_log(path, rank, place, title) {
  try {
    const text = await (await ask(`${path}/log/${rank}`)).text();
    const before = text.lastIndexOf("Traceback (most recent call last)");
    const lines = text.slice(0, before < 0 ? undefined : before).replace(/elche: this rank has failed: $/, "").trimEnd().split("\n").slice(-15).join("\n");
    if (!lines) return;
    place.textContent = lines;
    place.hidden = title.hidden = false;
  } catch {
    // the host is not here any more, and has the log
  }
}

const figures = (metrics) => Object.entries(metrics || {}).map(([name, value]) => `${name} ${plain(value, 4)}`).join(", ");

function success(job, about) {
  const best = about.best;
  const monitored = best && about.monitor in (best.metrics || {});
  const fact = (name, text) => (text ? h("div", {}, h("dt", {}, name), h("dd", {}, text)) : null);
  return [
    h("h3", { class: "good" }, about.ended_early ? "Succeeded, early" : "Succeeded"),
    about.ended_early ? h("p", {}, about.ended_early) : null,
    h("dl", { class: "facts" },
      fact(monitored ? `Best ${about.monitor}` : "Best checkpoint", best && `${monitored ? `${plain(best.metrics[about.monitor], 5)}, ` : `${figures(best.metrics)}${figures(best.metrics) ? ", " : ""}`}after epoch ${best.epoch}`),
      fact("Last evaluation", figures(about.final)),
      fact("Trained in", about.trained_s ? `${span(about.trained_s)}, ${plain(about.rate)} samples/s` : ""),
      fact("Model", about.model && h("span", {}, h("code", {}, about.model), about.best && about.model_is ? `, ${about.model_is}` : "")),
      fact("Not the best, because", about.best_problem)),
  ];
}

function show_answers(job, about) {
  const answer = (question, text, more, kind = "") => h("div", {}, h("dt", {}, question), h("dd", { class: `big ${kind}` }, text), h("dd", { class: "soft" }, more || ""));
  $("answers").replaceChildren(far(job, answer), ending(job, about, answer), slowest(job, answer), averaging(job, answer));
}

function far(job, answer) {
  const told = `loss ${plain(job.loss, 4)}${figures(job.metrics) ? `, ${figures(job.metrics)}` : ""}`;
  if (!job.epochs) return answer("How far is it?", job.ended ? "–" : job.state, job.reason);
  return answer("How far is it?", `epoch ${Math.min(job.epoch + 1, job.epochs)} of ${job.epochs}, ${percent(job.progress, 0)}`, told.slice(0, 200));
}

function ending(job, about, answer) {
  const stalled = job.table.filter((rank) => rank.state === "stalled");
  if (job.ended) return answer("How long did it take?", span(about.ran_s ?? about.trained_s), about.ended_at ? `ended ${when(about.ended_at)}` : "");
  if (stalled.length) return answer("When will it end?", "not known", `stalled: ${stalled.length === 1 ? `rank ${stalled[0].rank} has` : `${stalled.length} ranks have`} stalled`, "bad");
  if (job.state === "paused") return answer("When will it end?", "paused", "");
  if (job.eta_s === null) return answer("When will it end?", "–", job.epochs ? job.pacing || job.reason : "it has not begun");
  return answer("When will it end?", `in ${span(job.eta_s)}`, `at ${when(Date.now() / 1000 + job.eta_s)}; ${plain(job.samples_per_s)} samples/s so far`);
}

function slowest(job, answer) {
  const stalled = job.table.find((rank) => rank.state === "stalled");
  if (stalled) return answer("Which rank is slowest?", `rank ${stalled.rank} has stalled`, `no batch${stalled.stalled_s ? ` for ${span(stalled.stalled_s)}` : ""}, on ${stalled.host} (${stalled.device})`, "bad");
  const spread = job.spread;
  if (!spread) return answer("Which rank is slowest?", "–", job.ended ? "no figures were saved" : "no batch yet");
  const where = `${ms(spread.ms)} a batch on ${spread.host} (${spread.device})`;
  if (job.ranks < 2) return answer("How fast?", `${ms(spread.ms)} a batch`, spread.device);
  if (spread.ratio < 1.05) return answer("Which rank is slowest?", "none: all are equally fast", where);
  return answer("Which rank is slowest?", `rank ${spread.rank}`, `${where}; the fastest is ${plain(spread.ratio, spread.ratio < 2 ? 3 : 2)} times as fast`);
}

function averaging(job, answer) {
  if (!job.rounds || job.overhead === null) return answer("Does averaging hurt?", "–", job.rounds ? "no figures were saved" : "no round yet");
  const hurts = job.overhead > 0.1;
  const divergence = job.spread && job.spread.divergence !== null ? `; divergence ${plain(job.spread.divergence, 2)}` : "";
  const round = job.round_s ? `a round every ${ms(1000 * job.round_s)}, averaging ${ms(1000 * job.averaging_s)}` : plural(job.rounds, "round");
  const discarded = job.discarded ? `; the values of ${plural(job.discarded, "sample")} were left out` : "";
  return answer("Does averaging hurt?", `${hurts ? "yes" : "no"}, ${percent(job.overhead)} of the time`, round + divergence + discarded, hurts || discarded ? "warn" : "good");
}

const COLUMNS = ["Rank", "Where", "State", "Batch", "Share", "In this round", "Waits", "Divergence", "Memory", "GPU"];

function show_ranks(job, about, path) {
  const agents = {}; // host -> the agents that attend under its name
  for (const rank of job.table) (agents[rank.host] = agents[rank.host] || new Set()).add(rank.agent);
  const hidden = { GPU: job.table.every((rank) => rank.gpu === null), "In this round": job.ended };
  const is_shown = (_, index) => !hidden[COLUMNS[index]];
  const columns = COLUMNS.filter(is_shown);
  const head = h("thead", {}, h("tr", {}, ...columns.map((name) => h("th", { scope: "col" }, name))));
  const rows = job.table.map((rank) => {
    const cells = cells_of(rank, job, about, path, agents[rank.host].size > 1).filter(is_shown);
    return h("tr", { class: row_class(rank, job, about) }, ...cells.map((cell, index) => h("td", { "data-name": columns[index] }, cell instanceof Node ? cell : String(cell))));
  });
  replace($("ranks"), [head, h("tbody", {}, ...(rows.length ? rows : [h("tr", {}, h("td", { class: "soft", colspan: COLUMNS.length }, job.ended ? "No figures of its ranks were saved." : "No rank yet."))]))]);
  $("hidden-ranks").textContent = job.num_ranks_hidden ? `The slowest ${job.table.length} ranks; ${job.num_ranks_hidden} faster ones are not shown.` : "";
}

function row_class(rank, job, about) {
  if (rank.rank === about.failed_rank) return "failed";
  if (rank.state === "stalled") return "stalled";
  return job.spread && job.ranks > 1 && job.spread.ratio >= 1.05 && rank.rank === job.spread.rank ? "slowest" : null;
}

function cells_of(rank, job, about, path, has_namesake) {
  const two = (first, second, kind = "two nowrap") => h("span", { class: kind }, h("span", {}, first), h("span", { class: "soft" }, second));
  const all = rank.compute_s + rank.waited_s + rank.data_wait_s + rank.throttled_s || 1;
  const gpu = rank.gpu === null ? "–" : two(percent(rank.gpu, 0), [rank.celsius ? `${Math.round(rank.celsius)} °C` : "", rank.watts ? `${Math.round(rank.watts)} W` : ""].filter(Boolean).join(", "));
  const is_stalled = rank.state === "stalled";
  const state = rank.rank === about.failed_rank ? h("strong", { class: "bad nowrap" }, "failed") : is_stalled ? two(h("strong", { class: "bad" }, "stalled"), rank.stalled_s ? `for ${span(rank.stalled_s)}` : "") : h("span", { class: `${tone(rank.state)} nowrap` }, rank.state);
  return [
    h("span", { class: "rank" }, h("strong", {}, rank.rank), h("button", { type: "button", onclick: () => show_log(path, rank.rank), "aria-label": `Log of rank ${rank.rank}` }, "Log")),
    two(has_namesake && rank.agent ? `${rank.host} (${rank.agent})` : rank.host, rank.device, "two"),
    state,
    is_stalled ? two("–", `was ${ms(rank.ms)}`) : two(ms(rank.ms), `${plain(rank.samples_per_s)} samples/s`),
    h("span", { class: "nowrap" }, h("span", { class: "share" }, h("i", { style: `width:${(100 * rank.share).toFixed(0)}%` })), percent(rank.share, 0)),
    rank.target ? `${rank.made} of ${rank.target}` : rank.made,
    two(percent((rank.waited_s + rank.data_wait_s + rank.throttled_s) / all), `rounds ${percent(rank.waited_s / all, 0)}, data ${percent(rank.data_wait_s / all, 0)}${rank.throttled_s ? `, limit ${percent(rank.throttled_s / all, 0)}` : ""}`),
    plain(rank.divergence, 2),
    two(bytes(rank.memory), rank.memory_total ? `of ${bytes(rank.memory_total)}` : ""),
    gpu,
  ];
}

// A command's words, which are not broken at their hyphens: that would be another command.
const words = (text) => text.split(" ").flatMap((word, index) => [index ? " " : null, h("span", {}, word)]);

function show_about(job, about) {
  const key = JSON.stringify([job.id, about]);
  if ($("about").dataset.key === key) return;
  $("about").dataset.key = key;
  const fact = (name, text) => (text ? [h("div", {}, h("dt", {}, name), h("dd", {}, text))] : []);
  $("about").replaceChildren(
    ...fact("Submitted", job.submitted_at && `${day(job.submitted_at)}, ${clock(job.submitted_at)}`),
    ...fact("By", about.submitted_by),
    ...fact("Waited for slots", about.queue_wait_s ? span(about.queue_wait_s) : ""),
    ...fact("Ran", about.ran_s ? span(about.ran_s) : ""),
    ...fact("Ended", about.ended_at ? `${day(about.ended_at)}, ${clock(about.ended_at)}` : ""),
    ...fact("File", about.file),
    ...fact("Command", about.command && h("code", { class: "command" }, ...words(about.command))),
    ...fact("Ranks", about.asked_ranks ? String(about.asked_ranks) : about.is_loop ? "" : "all that were free"),
    ...fact("Resumed from", about.resume && h("code", {}, about.resume)));
  const given = new Set(about.given || []);
  const settings = Object.entries(about.settings || {});
  $("settings-box").hidden = !settings.length;
  $("settings").replaceChildren(...settings.map(([name, value]) => h("div", { class: given.has(name) ? "given" : null, title: given.has(name) ? "asked for when it was submitted" : null }, h("dt", {}, name), h("dd", {}, value))));
}

function show_checkpoints(job) {
  const items = [...job.checkpoints].reverse().map((one) => h("li", {},
    h("strong", {}, `epoch ${one.epoch}`), ` · batch ${plain(one.step, 9)} · ${bytes(one.size_bytes)}, written in ${span(one.duration_s)}${figures(one.metrics) ? ` · ${figures(one.metrics)}` : ""}`,
    one.is_best ? h("strong", { class: "good" }, " · the best") : "", h("br"), h("code", {}, one.path)));
  const hidden = job.num_checkpoints - job.checkpoints.length;
  if (hidden > 0) items.push(h("li", { class: "soft" }, `and ${hidden} older ones`));
  $("checkpoints").replaceChildren(...(items.length ? items : [h("li", { class: "soft" }, job.ended ? "None." : "None yet.")]));
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

function take_events(news) {
  const all = [...events, ...news];
  const newest = (is_kept) => all.filter(is_kept).slice(-500);
  events = [...newest((one) => one.kind !== "pacing"), ...newest((one) => one.kind === "pacing")].sort((one, two) => one.at - two.at);
  list_happenings();
}

// Changes of the anchor come every second or two: they are listed when they are searched for.
function list_happenings() {
  const sought = $("filter").value.trim().toLowerCase();
  const found = events.filter((one) => sought ? clock(one.at).startsWith(sought) || one.text.toLowerCase().includes(sought) : one.kind !== "pacing");
  $("events").replaceChildren(...found.slice(-200).reverse().map((one) =>
    h("li", { class: one.kind }, h("time", { datetime: new Date(one.at * 1000).toISOString(), title: new Date(one.at * 1000).toLocaleString() }, clock(one.at)), h("span", {}, is_today(one.at) ? one.text : `${one.text} (${day(one.at)})`))));
}

// From the address to a job, or to the hosts.

function select() {
  let address = location.hash.replace(/^#(job=)?/, "");
  try {
    address = decodeURIComponent(address);
  } catch {
    // it is taken as it stands
  }
  const is_hosts = location.hash === "#hosts";
  if (reading && is_hosts === at_hosts && (is_hosts || address === selected)) return;
  at_hosts = is_hosts;
  selected = is_hosts ? "" : address;
  $("list").open = !NARROW.matches;
  $("other").value = "";
  compare("");
  read();
}

let typing = 0;
function want(name, page, element) {
  element.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => {
      wanted[name] = element.value.trim();
      wanted[page] = 0;
      read();
    }, 200);
  });
}

want("text", "page", $("text"));
want("state", "page", $("of-state"));
want("host_text", "host_page", $("host-text"));
$("wanted").addEventListener("submit", (event) => event.preventDefault());
$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("elche-token", $("token").value.trim());
  $("token").value = "";
  read();
});
$("leave").addEventListener("click", () => {
  sessionStorage.removeItem("elche-token");
  location.reload();
});
$("filter").addEventListener("input", list_happenings);
$("journal").addEventListener("click", () => download(`/api/jobs/${encodeURIComponent(selected)}`, "journal"));
NARROW.addEventListener("change", () => ($("list").open = !NARROW.matches));
addEventListener("hashchange", select);
addEventListener("DOMContentLoaded", select); // when the charts' file is there too
