"""One job: when does it end, what happened, which rank is slowest, is averaging hurting, does it learn."""

import look
from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.builders.stat import Panel as Figure
from grafana_foundation_sdk.models.common import BigValueTextMode
from states import JOB_STATES, RANK_STATES, TEXTS, coded

THIS = 'job="$job"'
NAME = "rank {{rank}} · {{device}}"
RANK_LOST = look.Event(
    "rank lost", f"elche_job_lost_ranks_total{{{THIS}}}", "A rank died or could not be reached.", look.BAD
)
FAILED_CHECKPOINTS = f"elche_job_checkpoint_failures_total{{{THIS}}}"
# What averaging costs: the default of overhead_target.
COST = ((None, look.GOOD), (0.1, look.WARN), (0.3, look.BAD))
ON_THE_RIGHT = look.set_to(
    unit="short", custom__axisPlacement="right", custom__axisLabel="batches", custom__axisSoftMin=0
)


def job() -> Dashboard:
    return look.page(
        "elche-job",
        "elche / Job",
        "One training job.",
        look.figure(
            "State",
            "The job's state: green is training, red is failed.",
            coded("elche_job_state", THIS, JOB_STATES, "job"),
            unit="none",
        ).mappings(look.shows(TEXTS)),
        look.bars(
            "Progress",
            "The trained fraction of all epochs' samples, and the present epoch, of how many.",
            look.now(f"elche_job_progress_ratio{{{THIS}}}", "all epochs"),
            look.now(f"(elche_job_epoch{{{THIS}}} + 1) / elche_job_epochs{{{THIS}}}", "epoch"),
            unit="percentunit",
        )
        .max(1)
        .decimals(0)
        .span(4)
        .height(4),
        look.figure(
            "Ends in",
            "Estimated from the speed since training began.",
            f"elche_job_remaining_seconds{{{THIS}}}",
            unit="dtdurations",
        ),
        look.figure(
            "Ends at",
            "The same estimate as a time of day, in the browser's time zone.",
            f"(time() + elche_job_remaining_seconds{{{THIS}}}) * 1000",
            unit="time:ddd HH:mm",
        ),
        _slowest(),
        look.figure(
            "Lost to averaging",
            "Fraction of the training time in which rounds kept ranks waiting. The default target is 10 %.",
            f"elche_job_overhead_ratio{{{THIS}}}",
            unit="percentunit",
            steps=COST,
        ).decimals(1),
        look.figure(
            "Lost ranks",
            "Ranks that died or could not be reached. The others go on, and each is started again.",
            f"elche_job_lost_ranks_total{{{THIS}}}",
            unit="none",
            steps=((None, look.GOOD), (1, look.BAD)),
            span=2,
        ),
        look.figure(
            "Last saved",
            "Age of the newest checkpoint: the training time that would be lost if every rank stopped now. "
            "The default interval is 10 minutes.",
            f"elche_job_checkpoint_age_seconds{{{THIS}}}",
            unit="dtdurations",
            steps=((None, look.GOOD), (1200, look.WARN), (1800, look.BAD)),
            span=2,
        ),
        look.timeline(
            "What happened: red marks are lost ranks, orange rounds given up, blue regroups, purple failed checkpoints",
            "States of the job and of each rank. Averaging in short spells is normal; in a long one, the rank waits.",
            look.over_time(coded("elche_job_state", THIS, JOB_STATES, "job"), "job"),
            look.over_time(coded("elche_rank_state", THIS, RANK_STATES, "rank"), "rank {{rank}}"),
            texts=TEXTS,
        ),
        "Which rank is slowest, and by how much?",
        look.with_rank_colors(
            look.bars(
                "Speed of each rank: the shortest bar is the slowest",
                "Samples per second between rounds, waits for data included; mean of the last minute.",
                look.now(
                    f"sort(max by (rank, device) (avg_over_time(elche_rank_samples_per_second{{{THIS}}}[1m])))", NAME
                ),
                unit=look.PER_SECOND,
            )
        ).decimals(0),
        look.lines(
            "Time per batch: a step up is a device that became slower",
            "Waits for the batch's data included. Rounds are planned with this time.",
            f"elche_rank_batch_seconds{{{THIS}}}",
            unit="s",
            by_rank=True,
            span=8,
        ),
        look.lines(
            "Share of the work: follows the speeds",
            "Each rank's fraction of the batches that all ranks train.",
            f"rate(elche_rank_batches_total{{{THIS}}}[$__rate_interval]) / on (job) group_left () "
            f"(sum by (job) (rate(elche_rank_batches_total{{{THIS}}}[$__rate_interval])) > 0)",
            unit="percentunit",
            by_rank=True,
            span=8,
        ).max(1),
        "Is averaging hurting?",
        look.lines(
            "Time lost to averaging: bad above the dashed line",
            "Fraction of the time in which rounds kept ranks waiting. "
            "Far above 10 %: a slow network or a stalled rank.",
            look.over_time(
                f"avg by (job) (rate(elche_rank_round_wait_seconds_total{{{THIS}}}[$__rate_interval]))", "now"
            ),
            look.over_time(f"elche_job_overhead_ratio{{{THIS}}}", "since the beginning"),
            look.over_time(
                f"avg by (job) (rate(elche_rank_data_wait_seconds_total{{{THIS}}}[$__rate_interval]))",
                "waiting for data",
            ),
            unit="percentunit",
            steps=((None, "transparent"), (0.1, look.WARN)),
            colors={"now": look.ORANGE, "since the beginning": look.GREY, "waiting for data": look.CYAN},
            span=8,
        ),
        look.lines(
            "Divergence: rising is bad, above the line it averages more",
            "L2 norm of what a round changed in a rank's parameters, over the result's. It falls after early training.",
            f"elche_rank_divergence_ratio{{{THIS}}}",
            unit="percentunit",
            steps=((None, "transparent"), (0.05, look.WARN)),
            by_rank=True,
            span=8,
        ),
        look.lines(
            "Rounds: averaging should be a small part of a round",
            "Time between commits, and the averaging in it. Anchor: the slowest rank's batches per round (right axis).",
            look.over_time(f"elche_job_round_duration_seconds{{{THIS}}}", "round"),
            look.over_time(f"elche_job_averaging_seconds{{{THIS}}}", "averaging"),
            look.over_time(f"elche_job_anchor_batches{{{THIS}}}", "anchor"),
            unit="s",
            colors={"round": look.BLUE, "averaging": look.ORANGE, "anchor": look.GREY},
            span=8,
        ).override_by_name("anchor", ON_THE_RIGHT),
        "Does it learn?",
        look.lines(
            "Training loss: should fall",
            "Mean loss of the batches that ranks last reported.",
            look.over_time(f"elche_job_loss{{{THIS}}}", "training loss"),
            unit="short",
            colors={"training loss": look.BLUE},
        ).decimals(3),
        look.lines(
            "Evaluation of the averaged model, after each epoch",
            "Metrics that the job's evaluate or eval_step returns.",
            look.over_time(f"elche_job_evaluation{{{THIS}}}", "{{metric}}"),
            unit="short",
        ).decimals(3),
        events=[
            look.Event(
                "round aborted", f"elche_job_aborted_rounds_total{{{THIS}}}", "Given up and announced again.", look.WARN
            ),
            look.Event("regrouped", f"elche_job_regroups_total{{{THIS}}}", "A new process group.", "blue"),
            look.Event("checkpoint failed", FAILED_CHECKPOINTS, "It could not be written.", "purple"),
            RANK_LOST,
        ],
        variables=[look.JOB],
    )


def _slowest() -> Figure:
    speed = f"avg_over_time(elche_rank_samples_per_second{{{THIS}}}[1m]) > 0"
    expr = f"max by (job) ({speed}) / on (job) group_right () bottomk(1, {speed})"
    panel = look.figure(
        "Slowest rank",
        "How many times slower than the fastest rank, by samples per second. "
        "Not a fault in itself: faster ranks get more batches.",
        look.now(expr, "rank {{rank}}"),
        unit=look.TIMES,
        span=4,
    )
    return panel.text_mode(BigValueTextMode.VALUE_AND_NAME).decimals(1)
