"""What a rank counts and tells of its batches."""

import pytest
import torch
from torch import nn

from elche_worker import TrainingJob, record_scalar
from elche_worker.telemetry.meter import MAX_BATCH_TIMES, Meter
from elche_worker.user.scalars import take_scalars


def meter_of(*losses: float, size: int = 4, epoch: int = 0) -> Meter:
    """After a batch of `size` samples for each loss."""
    meter = Meter(reads_losses=True)
    for loss in losses:
        meter.add_batch(epoch, size, torch.tensor(loss), {"seven": (7.0, 1)})
    return meter


def test_a_device_that_waits_for_its_data_has_the_pace_of_both() -> None:
    meter = meter_of(1.0, 2.0, 3.0)
    meter.add_data_wait(30.0)
    meter.add_data_wait(5.0)
    meter.add_times([10.0, 11.0])
    meter.add_times([12.0])
    report = meter.take_report()
    assert list(report.batch_ms) == [45.0, 11.0, 12.0], "the wait belongs to the batch that was waited for, once"
    assert report.data_wait_ms == 35.0
    assert meter.take_work().compute_ms == 33.0, "the wait is told apart from what is computed"


def test_a_wait_is_kept_until_the_time_of_its_batch_is_known() -> None:
    """On CUDA the times of a batch come later."""
    meter = meter_of(1.0)
    meter.add_data_wait(30.0)
    meter.add_times([])
    assert not meter.has_unreported
    meter.add_times([10.0])
    assert list(meter.take_report().batch_ms) == [40.0]


def test_waits_add_up_over_all_reports_and_losses_and_times_do_not() -> None:
    meter = meter_of(1.0, 3.0)
    meter.add_data_wait(30.0)
    meter.add_times([10.0, 10.0])
    first = meter.take_report()
    assert (first.local_step, first.num_processed, first.loss_sum, first.loss_count) == (2, 8, 4.0, 2)
    meter.add_batch(0, 2, torch.tensor(5.0), {})
    meter.add_data_wait(1.0)
    meter.add_times([10.0])
    second = meter.take_report()
    assert (second.local_step, second.num_processed, second.loss_sum, second.loss_count) == (3, 10, 5.0, 1)
    assert (list(second.batch_ms), second.data_wait_ms) == ([11.0], 31.0)


def test_a_report_has_no_more_than_the_newest_times() -> None:
    meter = meter_of(1.0)
    meter.add_times([float(ms) for ms in range(1, 100)])
    assert list(meter.take_report().batch_ms) == [float(ms) for ms in range(100 - MAX_BATCH_TIMES, 100)]


def test_the_work_of_a_round_that_is_given_up_belongs_to_the_next() -> None:
    meter = meter_of(1.0, 2.0)
    meter.add_times([10.0, 10.0])
    lost = meter.take_work()
    meter.add_batch(0, 4, torch.tensor(6.0), {"seven": (7.0, 1)})
    meter.add_batch(1, 3, torch.tensor(8.0), {})
    meter.add_times([10.0])
    meter.put_back(lost)
    work = meter.take_work()
    assert (work.weight, work.compute_ms) == (15, 30.0)
    first, second = work.to_messages()
    assert (first.epoch, first.num_batches, first.num_samples, first.loss_sum) == (0, 3, 12, 9.0)
    assert (first.scalars["seven"].sum, first.scalars["seven"].count) == (21.0, 3)
    assert (second.epoch, second.num_batches, second.num_samples, second.loss_sum) == (1, 1, 3, 8.0)
    assert meter.take_work().weight == 0


def test_losses_on_an_accelerator_are_not_read_before_the_round() -> None:
    meter = Meter(reads_losses=False)
    meter.add_batch(0, 4, torch.tensor(2.0, requires_grad=True), {})
    meter.add_batch(0, 4, torch.tensor(4.0, requires_grad=True), {})
    report = meter.take_report()
    assert (report.loss_sum, report.loss_count) == (0.0, 0)
    loss_sum = meter.work.epochs[0].loss_sum
    assert isinstance(loss_sum, torch.Tensor)
    assert not loss_sum.requires_grad, "else every graph of the round stays in memory"
    assert meter.take_work().to_messages()[0].loss_sum == pytest.approx(6.0)


def test_losses_and_scalars_of_a_narrow_precision_are_summed_in_a_wide_one() -> None:
    """A sum in bf16 stays at 256: 300 losses of 1 would be 0.85 on the average."""
    meter, one = Meter(reads_losses=False), torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(300):
        record_scalar("recorded", one)
        meter.add_batch(0, 4, one, take_scalars())
    work = meter.take_work().to_messages()[0]
    assert (work.loss_sum, work.scalars["recorded"].sum) == (300.0, 300.0)


def test_a_model_in_bf16_has_the_mean_loss_of_its_epoch() -> None:
    seen: list[object] = []
    TrainingJob(
        model=lambda: nn.Linear(1, 1, dtype=torch.bfloat16),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
        dataset=lambda: [torch.zeros(1, dtype=torch.bfloat16)] * 300,
        train_step=lambda model, batch: {"loss": model(batch).sum() * 0 + 1, "told": model.weight.sum() * 0 + 1},
        batch_size=1,
        epochs=1,
        metrics_fn=lambda metrics: seen.append((metrics.loss, metrics.scalars["told"])),
    ).run(device="cpu")
    assert seen == [(1.0, 1.0)]
