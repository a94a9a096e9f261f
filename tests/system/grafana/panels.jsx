// Draws a dashboard's panels with Grafana's own components, with what Prometheus answers.
// A state timeline is not among the public components: it is drawn here, with Grafana's mappings and colours.
import React from 'react';
import { createRoot } from 'react-dom/client';
import {
  applyFieldOverrides,
  createTheme,
  dateTime,
  FieldConfigOptionsRegistry,
  FieldType,
  getDisplayValueAlignmentFactors,
  getFieldDisplayName,
  getFieldDisplayValues,
  identityOverrideProcessor,
  standardTransformers,
  standardTransformersRegistry,
  ThemeContext,
  toDataFrame,
  transformDataFrame,
} from '@grafana/data';
import { BarGauge, BigValue, GlobalStyles, PanelChrome, TimeSeries, VizRepeater } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import { firstValueFrom } from 'rxjs';

const CELL = 30;
const GAP = 8;
const theme = createTheme({ colors: { mode: 'dark' } });
const asIs = (value) => value;

// The properties that the dashboards use; Grafana's own registry is in its application, not in a package.
const STANDARD = ['unit', 'min', 'max', 'decimals', 'displayName', 'mappings', 'thresholds', 'color', 'noValue', 'links'];
const CUSTOM = `drawStyle lineWidth lineStyle lineInterpolation fillOpacity gradientMode showPoints pointSize spanNulls stacking
  thresholdsStyle axisPlacement axisLabel axisSoftMin axisSoftMax scaleDistribution hideFrom align cellOptions width minWidth`.split(/\s+/);
const item = (id, path, isCustom) => ({
  id, path, isCustom, name: path, description: '', override: () => null, editor: () => null,
  process: identityOverrideProcessor, shouldApply: () => true, settings: {},
});
const registry = new FieldConfigOptionsRegistry(() => [
  ...STANDARD.map((name) => item(name, name, false)),
  ...CUSTOM.map((name) => item(`custom.${name}`, name, true)),
]);
standardTransformersRegistry.setInit(() =>
  [standardTransformers.mergeTransformer, standardTransformers.organizeFieldsTransformer].map((transformation) => ({
    id: transformation.id, name: transformation.name, transformation, description: '', imageDark: '', imageLight: '', editor: null,
  }))
);

const DRAWS = { timeseries: Curves, stat: Figures, bargauge: Bars, table: Rows, 'state-timeline': Timeline };
const CUSTOM_DEFAULTS = { drawStyle: 'line', lineInterpolation: 'linear', pointSize: 5, spanNulls: false, axisPlacement: 'auto' };

const range = (setup) => ({ from: dateTime(setup.from * 1000), to: dateTime(setup.to * 1000), raw: { from: 'now-1h', to: 'now' } });

function filledIn(text, setup, stepS) {
  const rateS = Math.max(stepS + setup.scrapeS, 4 * setup.scrapeS);
  const values = { __rate_interval: `${rateS}s`, __interval: `${stepS}s`, __range: `${setup.to - setup.from}s`, job: setup.job, rank: setup.rank };
  return text.replace(/\$(\w+)/g, (whole, name) => values[name] ?? whole);
}

async function ask(path, parameters) {
  const answer = await fetch(`/api/v1/${path}?${new URLSearchParams(parameters)}`);
  const body = await answer.json();
  if (body.status !== 'success') {
    throw new Error(`${parameters.query}: ${body.error}`);
  }
  return body.data.result;
}

const named = (legend, labels) => legend.replace(/{{\s*(\w+)\s*}}/g, (_, label) => labels[label] ?? '');

function series(query, labels, points, stepS) {
  return toDataFrame({
    refId: query.refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: points.map(([at]) => at * 1000), config: { interval: stepS * 1000 } },
      {
        name: 'Value', type: FieldType.number, values: points.map(([, value]) => Number(value)), labels,
        config: { displayNameFromDS: query.legendFormat ? named(query.legendFormat, labels) : undefined },
      },
    ],
  });
}

function table(query, result, isOnly) {
  const labels = [...new Set(result.flatMap(({ metric }) => Object.keys(metric)))].sort();
  return toDataFrame({
    refId: query.refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: result.map(({ value }) => value[0] * 1000) },
      ...labels.map((label) => ({ name: label, type: FieldType.string, values: result.map(({ metric }) => metric[label] ?? '') })),
      { name: isOnly ? 'Value' : `Value #${query.refId}`, type: FieldType.number, values: result.map(({ value }) => Number(value[1])) },
    ],
  });
}

async function framesOf(panel, setup, width) {
  const stepS = Math.max(setup.scrapeS, Math.ceil((setup.to - setup.from) / width));
  const frames = await Promise.all(
    panel.targets.map(async (query) => {
      const expr = filledIn(query.expr, setup, stepS);
      if (query.instant) {
        const result = await ask('query', { query: expr, time: setup.to });
        return query.format === 'table'
          ? [table(query, result, panel.targets.length === 1)]
          : result.map(({ metric, value }) => series(query, metric, [value], stepS));
      }
      const from = Math.ceil(setup.from / stepS) * stepS;
      const result = await ask('query_range', { query: expr, start: from, end: setup.to, step: stepS });
      return result.map(({ metric, values }) => series(query, metric, values, stepS));
    })
  );
  const transformed = await firstValueFrom(transformDataFrame(panel.transformations ?? [], frames.flat()));
  const overridden = applyFieldOverrides({
    data: transformed, fieldConfig: configOf(panel), fieldConfigRegistry: registry, replaceVariables: asIs, theme, timeZone: 'utc',
  });
  for (const frame of overridden) frame.fields.forEach((field) => getFieldDisplayName(field, frame, overridden)); // which keeps it
  return overridden;
}

function configOf(panel) {
  const withInfinity = (thresholds) =>
    thresholds && { ...thresholds, steps: thresholds.steps.map((step) => ({ ...step, value: step.value ?? -Infinity })) };
  const { defaults, overrides } = panel.fieldConfig;
  return {
    defaults: { ...defaults, thresholds: withInfinity(defaults.thresholds), custom: { ...CUSTOM_DEFAULTS, ...defaults.custom } },
    overrides: overrides.map(({ matcher, properties }) => ({
      matcher,
      properties: properties.map(({ id, value }) => ({ id, value: id === 'thresholds' ? withInfinity(value) : value })),
    })),
  };
}

async function eventsOf(dashboard, setup) {
  const stepS = Math.max(setup.scrapeS, Math.ceil((setup.to - setup.from) / 100));
  const found = (dashboard.annotations?.list ?? []).map(async ({ target, iconColor, name }) => {
    const parameters = { query: filledIn(target.expr, setup, stepS), start: setup.from, end: setup.to, step: stepS };
    const result = await ask('query_range', parameters);
    return result.flatMap(({ values }) => values.map(([at]) => ({ at, name, color: theme.visualization.getColorByName(iconColor) })));
  });
  return (await Promise.all(found)).flat();
}

function Curves({ panel, frames, width, height, setup, events }) {
  return (
    <TimeSeries
      frames={frames} width={width} height={height} timeRange={range(setup)} timeZone="utc" structureRev={1}
      legend={panel.options.legend} options={panel.options}
    >
      {(builder) => {
        builder.addHook('draw', (plot) => {
          const { ctx, bbox } = plot;
          ctx.save();
          ctx.setLineDash([4, 4]);
          for (const { at, color } of events) {
            const x = Math.round(plot.valToPos(at * 1000, 'x', true));
            ctx.strokeStyle = ctx.fillStyle = color;
            ctx.beginPath();
            ctx.moveTo(x, bbox.top);
            ctx.lineTo(x, bbox.top + bbox.height);
            ctx.stroke();
            ctx.beginPath();
            ctx.moveTo(x - 5, bbox.top + bbox.height + 6);
            ctx.lineTo(x + 5, bbox.top + bbox.height + 6);
            ctx.lineTo(x, bbox.top + bbox.height);
            ctx.fill();
          }
          ctx.restore();
        });
        return null;
      }}
    </TimeSeries>
  );
}

const valuesOf = (panel, frames) =>
  getFieldDisplayValues({
    fieldConfig: configOf(panel), reduceOptions: panel.options.reduceOptions, replaceVariables: asIs, theme, data: frames, timeZone: 'utc',
  });

function Figures({ panel, frames, width, height }) {
  const { colorMode, graphMode, justifyMode, textMode } = panel.options;
  return (
    <VizRepeater
      getValues={() => valuesOf(panel, frames)} source={frames} renderCounter={1} width={width} height={height} orientation="auto"
      renderValue={({ value, width, height, count }) => (
        <BigValue
          theme={theme} value={value.display} width={width} height={height} count={count}
          colorMode={colorMode} graphMode={graphMode} justifyMode={justifyMode} textMode={textMode ?? 'auto'}
        />
      )}
    />
  );
}

function Bars({ panel, frames, width, height }) {
  const { displayMode, orientation, showUnfilled, namePlacement, text } = panel.options;
  return (
    <VizRepeater
      getValues={() => valuesOf(panel, frames)} source={frames} renderCounter={1} width={width} height={height} orientation={orientation}
      itemSpacing={8} minVizHeight={panel.options.minVizHeight} maxVizHeight={panel.options.maxVizHeight} getAlignmentFactors={getDisplayValueAlignmentFactors}
      renderValue={({ value, width, height, alignmentFactors }) => (
        <BarGauge
          theme={theme} value={value.display} field={value.field} display={value.view?.getFieldDisplayProcessor(value.colIndex)}
          width={width} height={height} orientation={orientation} displayMode={displayMode} showUnfilled={showUnfilled}
          namePlacement={namePlacement} text={text} alignmentFactors={alignmentFactors} itemSpacing={8}
        />
      )}
    />
  );
}

function Rows({ panel, frames, width, height, setup }) {
  return (
    <TableNG
      data={frames[0]} width={width} height={height} cellHeight={panel.options.cellHeight} timeRange={range(setup)} structureRev={1}
      initialSortBy={panel.options.sortBy} fieldConfig={configOf(panel)} getActions={() => []}
    />
  );
}

function Timeline({ frames, width, height, setup, events }) {
  const names = frames.map((frame) => getFieldDisplayName(frame.fields[1], frame, frames));
  const left = Math.min(280, 16 + 7 * Math.max(...names.map((name) => name.length)));
  const bottom = 42;
  const rowHeight = (height - bottom) / frames.length;
  const place = (ms) => left + ((ms / 1000 - setup.from) / (setup.to - setup.from)) * (width - left - 8);
  const seen = new Map();
  const boxes = frames.flatMap((frame, row) => {
    const [time, value] = frame.fields;
    const spans = [];
    time.values.forEach((at, index) => {
      const end = at + time.config.interval;
      const before = spans.at(-1);
      if (before && before.value === value.values[index] && at - before.end <= time.config.interval) {
        before.end = end;
      } else {
        spans.push({ begin: at, end, value: value.values[index] });
      }
    });
    return spans.map((span) => {
      const shown = value.display(span.value);
      seen.set(shown.text, shown.color);
      const [x, to] = [Math.max(left, place(span.begin)), Math.min(width - 8, place(span.end))];
      return (
        <g key={`${row} ${span.begin}`}>
          <rect x={x} y={(row + 0.1) * rowHeight} width={Math.max(1, to - x)} height={0.8 * rowHeight} fill={shown.color} fillOpacity={0.8} />
          {to - x > 9 * shown.text.length && (
            <text x={x + 6} y={(row + 0.5) * rowHeight + 4} fill="#111217" fontSize={12}>{shown.text}</text>
          )}
        </g>
      );
    });
  });
  const tickS = [15, 30, 60, 120, 300, 600, 1800, 3600].find((step) => (setup.to - setup.from) / step < 16) ?? 7200;
  const firstS = Math.ceil(setup.from / tickS + 0.5) * tickS;
  const ticks = Array.from({ length: Math.floor((setup.to - firstS) / tickS) + 1 }, (_, index) => (firstS + index * tickS) * 1000);
  return (
    <div>
      <svg width={width} height={height - 20} style={{ fontFamily: theme.typography.fontFamily, display: 'block' }}>
        {names.map((name, row) => (
          <text key={name} x={left - 10} y={(row + 0.5) * rowHeight + 4} textAnchor="end" fill={theme.colors.text.primary} fontSize={12}>{name}</text>
        ))}
        {boxes}
        {events.map(({ at, color }, index) => (
          <line key={index} x1={place(at * 1000)} x2={place(at * 1000)} y1={0} y2={height - bottom} stroke={color} strokeWidth={1.5} strokeDasharray="4 4" />
        ))}
        {ticks.map((at) => (
          <text key={at} x={place(at)} y={height - bottom + 16} textAnchor="middle" fill={theme.colors.text.primary} fontSize={12}>
            {dateTime(at).utc().format(tickS < 60 ? 'HH:mm:ss' : 'HH:mm')}
          </text>
        ))}
      </svg>
      <div style={{ fontSize: 12, display: 'flex', gap: 16, paddingLeft: left }}>
        {[...seen].map(([text, color]) => (
          <span key={text}><b style={{ color }}>▬</b> {text}</span>
        ))}
      </div>
    </div>
  );
}

const Empty = ({ text, width, height }) => (
  <div style={{ width, height, display: 'grid', placeItems: 'center', color: theme.colors.text.secondary, fontSize: text.length < 3 ? 40 : 16 }}>
    {text}
  </div>
);

function Panel({ panel, unit, frames, setup, events }) {
  const { x, y, w, h } = panel.gridPos;
  const box = { position: 'absolute', left: x * unit + GAP / 2, top: y * (CELL + GAP), width: w * unit - GAP, height: h * (CELL + GAP) - GAP };
  if (panel.type === 'row') {
    return <div style={{ ...box, lineHeight: '30px', fontSize: 18, fontWeight: 500 }}>{panel.title}</div>;
  }
  const Draw = DRAWS[panel.type];
  const isEmpty = frames.every((frame) => frame.length === 0);
  return (
    <div style={box}>
      <PanelChrome title={panel.title} width={box.width} height={box.height}>
        {(width, height) =>
          isEmpty ? (
            <Empty text={panel.fieldConfig.defaults.noValue ?? 'No data'} width={width} height={height} />
          ) : (
            <Draw panel={panel} frames={frames} width={width} height={height} setup={setup} events={events} />
          )
        }
      </PanelChrome>
    </div>
  );
}

window.drawDashboard = async (dashboard, setup) => {
  const unit = (setup.width - 2 * GAP) / 24;
  const events = await eventsOf(dashboard, setup);
  const all = await Promise.all(
    dashboard.panels.map(async (panel) => [panel, panel.targets ? await framesOf(panel, setup, panel.gridPos.w * unit) : []])
  );
  const bottom = Math.max(...dashboard.panels.map(({ gridPos }) => gridPos.y + gridPos.h)) * (CELL + GAP);
  const root = document.getElementById('root');
  createRoot(root).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div style={{ height: 40, padding: '8px 12px', fontSize: 20, fontWeight: 500 }}>
        {dashboard.title}
        <span style={{ color: theme.colors.text.secondary, fontSize: 14, marginLeft: 24 }}>
          {(dashboard.templating?.list ?? []).map(({ name, label }) => `${label}: ${name === 'rank' ? 'All' : setup[name]}`).join('   ')}
        </span>
      </div>
      <div style={{ position: 'relative', margin: GAP / 2, height: bottom }}>
        {all.map(([panel, frames]) => (
          <Panel key={panel.id ?? panel.title} panel={panel} unit={unit} frames={frames} setup={setup} events={events} />
        ))}
      </div>
    </ThemeContext.Provider>
  );
  return all.filter(([panel, frames]) => panel.targets && frames.every((frame) => frame.length === 0)).map(([panel]) => panel.title);
};
