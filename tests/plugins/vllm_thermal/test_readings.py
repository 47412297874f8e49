"""Temperatures from files and from NVML's names; which GPUs are an engine's."""

import os
import threading

import pytest

from vllm_thermal.readings import FileReader, ReadingError, Readings, gpus_of, of_text, reader


def test_a_line_for_each_gpu():
    assert of_text("# GPU C\n0 61.5\n\n1   70\n") == {0: 61.5, 1: 70.0}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "no GPU is named"),
        ("0 61.5\nx 70", "line 2 is not `GPU CELSIUS`: 'x 70'"),
        ("0", "line 1 is not `GPU CELSIUS`: '0'"),
        ("0 nan", "GPU 0 has nan C, which is outside of -40 to 200"),
        ("0 61000", "GPU 0 has 61000 C, which is outside of -40 to 200"),
    ],
)
def test_what_is_no_reading_is_named(text, wrong):
    with pytest.raises(ReadingError) as error:
        of_text(text)
    assert str(error.value) == wrong


def test_a_file_that_nobody_writes_is_no_new_reading(tmp_path):
    path = tmp_path / "gpus"
    read = FileReader(path)
    with pytest.raises(ReadingError, match="No such file"):
        read()
    path.write_text("0 61.5\n")
    assert read() == {0: 61.5}
    with pytest.raises(ReadingError, match="not written since the last reading"):
        read()
    os.utime(path, ns=(1, 1))
    assert read() == {0: 61.5}


def test_a_thread_renews_the_sample_and_outlives_what_cannot_be_read(tmp_path):
    path = tmp_path / "gpus"
    path.write_text("0 61.5\n")
    read, asked = FileReader(path), threading.Semaphore(0)

    def told():
        try:
            return read()
        finally:
            asked.release()

    readings = Readings(told, lambda: 5.0, period_s=0.001)
    assert (readings.latest.at_s, readings.latest.celsius) == (5.0, {0: 61.5})
    for _ in range(4):
        assert asked.acquire(timeout=60.0)
    assert readings.failures >= 1
    os.replace(_written(tmp_path / "next", "0 70\n"), path)
    while readings.latest.celsius != {0: 70.0}:
        assert asked.acquire(timeout=60.0)
    readings.close()
    assert not any(t.name == "thermal-readings" and t.is_alive() for t in threading.enumerate())


def _written(path, text):
    path.write_text(text)
    os.utime(path, ns=(2, 2))
    return path


@pytest.mark.parametrize(
    ("environment", "world_size", "local_rank", "gpus"),
    [
        ({}, 2, 0, ["0", "1"]),
        ({}, 2, 1, ["2", "3"]),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 2, 1, ["6", "7"]),
        ({"CUDA_VISIBLE_DEVICES": "6,7"}, 2, 1, ["6", "7"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, 1, 1, ["GPU-b"]),
        ({"VLLM_THERMAL_GPUS": "3, 1", "CUDA_VISIBLE_DEVICES": "4"}, 1, 0, ["3", "1"]),
    ],
)
def test_which_gpus_are_an_engines(environment, world_size, local_rank, gpus):
    assert gpus_of(environment, world_size, local_rank) == gpus


def test_where_readings_come_from(tmp_path):
    assert isinstance(reader({"VLLM_THERMAL_READINGS": f"file:{tmp_path}/x"}, 1, 0), FileReader)
    with pytest.raises(ReadingError, match="VLLM_THERMAL_READINGS is 'dcgm': it must be nvml, or"):
        reader({"VLLM_THERMAL_READINGS": "dcgm"}, 1, 0)
    with pytest.raises(ReadingError, match="VLLM_THERMAL_READINGS is 'file:': it must be nvml, or"):
        reader({"VLLM_THERMAL_READINGS": "file:"}, 1, 0)
