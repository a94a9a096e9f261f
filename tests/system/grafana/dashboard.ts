// What a committed dashboard must be: Grafana's own types, with the options of each kind of panel that is used.
import type { AnnotationQuery, Dashboard, Panel, RowPanel } from '@grafana/schema';
import type * as bargauge from '@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen';
import type * as stat from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as statetimeline from '@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen';
import type * as table from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type * as timeseries from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';

// As JSON has it: values instead of members of enums; everything may be left to its default.
type Json<T> = unknown extends T
  ? unknown
  : T extends string
    ? `${T}`
    : T extends number | boolean | null | undefined
      ? T
      : T extends Array<infer Item>
        ? Json<Item>[]
        : T extends object
          ? { [Key in keyof T]?: Json<T[Key]> }
          : T;

// The types have no null, which Grafana writes for the lowest threshold.
type Field<Custom> = Omit<Json<Panel['fieldConfig'] & object>, 'defaults'> & {
  defaults: Omit<Json<(Panel['fieldConfig'] & object)['defaults']>, 'custom' | 'thresholds'> & {
    custom?: Json<Custom>;
    thresholds: { mode: 'absolute' | 'percentage'; steps: Array<{ color: string; value: number | null }> };
    unit: string; // every panel says what it counts in
  };
};
// Every panel has a title, a text that explains it, and a query.
type Of<Kind extends string, Options, Custom = Record<string, never>> = Omit<
  Json<Panel>,
  'type' | 'options' | 'fieldConfig' | 'targets'
> & {
  type: Kind;
  title: string;
  description: string;
  options: Json<Options>;
  fieldConfig: Field<Custom>;
  targets: [Query, ...Query[]];
};
type Query = { refId: string; expr: string; datasource?: { type: 'prometheus'; uid: string } } & (
  | { instant: true; range: false; format?: 'table'; legendFormat?: string }
  | { instant: false; range: true; legendFormat?: string }
);
// The Prometheus data source reads these beside what the types say.
type Event = Omit<Json<AnnotationQuery>, 'target'> & {
  target: Query;
  titleFormat: string;
  textFormat: string;
  tagKeys: string;
  useValueForTime: boolean;
};

export type Checked = Omit<Json<Dashboard>, 'panels' | 'annotations'> & {
  annotations?: { list: Event[] };
  panels: Array<
    | Of<'timeseries', timeseries.Options, timeseries.FieldConfig>
    | Of<'stat', stat.Options>
    | Of<'bargauge', bargauge.Options>
    | Of<'table', table.Options, table.FieldConfig>
    | Of<'state-timeline', statetimeline.Options, statetimeline.FieldConfig>
    | Json<RowPanel>
  >;
};
