// Draws the dashboards: node draw.mjs --prometheus URL --job ID --from SECONDS --to SECONDS --out FOLDER
import { mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { build } from 'esbuild';
import { chromium } from 'playwright-core';
import UPNG from 'upng-js';

const HERE = dirname(fileURLToPath(import.meta.url));
const DASHBOARDS = join(HERE, '../../../docker/grafana/dashboards');
// Grafana's components want local storage, which a page without an origin has not.
const ORIGIN = 'http://dashboards.test';
const PAGE = '<!doctype html><html><body style="margin:0;background:#111217"><div id="root"></div></body></html>';
const now = Date.now() / 1000;
const { values: options } = parseArgs({
  options: {
    prometheus: { type: 'string', default: 'http://127.0.0.1:9090' },
    job: { type: 'string', default: '' },
    from: { type: 'string', default: String(now - 3600) },
    to: { type: 'string', default: String(now) },
    scrape: { type: 'string', default: '5' },
    width: { type: 'string', default: '1600' },
    out: { type: 'string', default: join(HERE, 'built') },
    browser: { type: 'string', default: '/usr/bin/chromium' },
  },
});
const setup = {
  job: options.job,
  rank: '.*',
  from: Math.floor(Number(options.from)),
  to: Math.floor(Number(options.to)),
  scrapeS: Number(options.scrape),
  width: Number(options.width),
};

const bundle = join(HERE, 'built', 'panels.js');
await build({
  entryPoints: [join(HERE, 'panels.jsx')],
  outfile: bundle,
  bundle: true,
  format: 'iife',
  jsx: 'automatic',
  minify: true,
  define: { 'process.env.NODE_ENV': '"production"', global: 'window' },
  loader: { '.svg': 'dataurl', '.woff2': 'empty', '.woff': 'empty', '.ttf': 'empty' },
  logLevel: 'error',
});
// The picture with 128 colours: a third of its size, and no difference to be seen.
function small(png) {
  const { width, height, ...picture } = UPNG.decode(png);
  return Buffer.from(UPNG.encode([UPNG.toRGBA8({ width, height, ...picture })[0]], width, height, 128));
}

// The page itself, and what it asks Prometheus.
async function answer(route) {
  const { pathname, search } = new URL(route.request().url());
  if (pathname === '/') return route.fulfill({ contentType: 'text/html', body: PAGE });
  if (!pathname.startsWith('/api/')) return route.fulfill({ status: 404 });
  const response = await fetch(`${options.prometheus}${pathname}${search}`);
  return route.fulfill({ contentType: 'application/json', body: await response.text() });
}

mkdirSync(options.out, { recursive: true });

const browser = await chromium.launch({
  executablePath: options.browser,
  args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'],
});
let isBad = false;
for (const file of readdirSync(DASHBOARDS).filter((name) => name.endsWith('.json')).sort()) {
  const page = await browser.newPage({ viewport: { width: setup.width, height: 1000 }, timezoneId: 'UTC' });
  page.on('pageerror', (error) => {
    isBad = true;
    console.error(`${file}: ${error.stack}`);
  });
  if (process.env.VERBOSE) page.on('console', (message) => console.error(message.text()));
  await page.route(`${ORIGIN}/**`, answer);
  await page.goto(`${ORIGIN}/`);
  await page.addScriptTag({ path: bundle });
  const empty = await page.evaluate(([dashboard, given]) => window.drawDashboard(dashboard, given), [
    JSON.parse(readFileSync(join(DASHBOARDS, file), 'utf8')),
    setup,
  ]);
  await page.addStyleTag({ path: bundle.replace('.js', '.css') });
  await page.waitForTimeout(1500);
  const target = join(options.out, file.replace('.json', '.png'));
  writeFileSync(target, small(await page.screenshot({ fullPage: true })));
  console.log(`${target}${empty.length ? `, without data: ${empty.join('; ')}` : ''}`);
  await page.close();
}
await browser.close();
process.exit(isBad ? 1 : 0);
