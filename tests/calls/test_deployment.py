"""Facts of `docs/operate.md` that a machine without a GPU can show: workers, and what each of them needs to do."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

import varlen_graphs as vg
from tests.support.forked_scripts import run_script

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")

LOADER = """
    from torch.utils.data import DataLoader, Dataset
    from tests.support.encoders import original_attention, rows_for

    torch.set_grad_enabled(False)
    LENGTHS = [[5, 9], [30], [3, 4, 5], [60]]
    module = Attention()
    original = original_attention(module)

    class Encoded(Dataset):
        def __len__(self):
            return len(LENGTHS)

        def __getitem__(self, at):
            return self.encoder(rows_for(LENGTHS[at]), lengths=LENGTHS[at])

    def load(dataset, method="fork", workers=2, **options):
        return [*DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=method, **options)]
"""


def test_workers_of_a_data_loader_make_encoders_of_their_own():
    """In `worker_init_fn`, or at the first item."""
    printed, _ = run_script(
        LOADER,
        """
    data = Encoded()

    def begin(worker):
        torch.utils.data.get_worker_info().dataset.encoder = attention_encoder(module=module)

    for got, lengths in zip(load(data, worker_init_fn=begin), LENGTHS):
        torch.testing.assert_close(got, original(rows_for(lengths), lengths))
        print("right")
    """,
    )
    assert printed == ["right"] * 4


def test_a_worker_that_gets_a_used_encoder_fails_with_what_to_do_and_the_parent_goes_on():
    printed, _ = run_script(
        LOADER,
        """
    data = Encoded()
    data.encoder = attention_encoder(module=module)
    expected = data[0]
    try:
        load(data, workers=1)
    except vg.errors.StaleGraphError as error:
        assert "in DataLoader worker process" in str(error)
        assert "start workers with multiprocessing's 'spawn', or create the encoder in the worker" in str(error)
        print("told")
    assert torch.equal(data[0], expected)
    print("whole")
    """,
    )
    assert printed == ["told", "whole"]


def test_workers_that_only_load_leave_the_encoder_of_the_parent_alone():
    printed, _ = run_script(
        LOADER,
        """
    import gc

    class Rows(Encoded):
        def __getitem__(self, at):
            gc.collect()
            return rows_for(LENGTHS[at])

    data = Rows()
    data.unused = encoder = attention_encoder(module=module)
    encoder(rows_for([5, 9]), lengths=[5, 9])
    for rows, lengths in zip(load(data), LENGTHS):
        torch.testing.assert_close(encoder(rows, lengths=lengths), original(rows, lengths))
    print(encoder.stats.replays.total())
    """,
    )
    assert printed == ["5"]


def test_an_encoder_is_not_sent_to_workers_that_are_spawned():
    printed, _ = run_script(
        LOADER,
        """
    data = Encoded()
    data.encoder = attention_encoder(module=module)
    try:
        load(data, "spawn")
    except TypeError as error:
        assert "copy its module, and make an encoder of the copy" in str(error)
        print("told")
    """,
    )
    assert printed == ["told"]


def test_a_thread_that_captures_is_not_in_a_forked_worker_until_that_starts_its_own():
    printed, _ = run_script("""
    from tests.support.encoders import captured, wait_for

    lazy = attention_encoder(spec=spec, capture=vg.options.Capture(lazy=True))
    lazy.capture_in_background()
    child = os.fork()
    if child == 0:
        for _ in range(5):
            lazy(rows, lengths=[6])
            time.sleep(0.1)
        print(lazy.stats.eager["not captured yet"], flush=True)
        lazy.capture_in_background()
        wait_for(lazy, lazy.budgets[:1])
        lazy(rows, lengths=[6])
        print(lazy.stats.replays.total(), flush=True)
        sys.exit(0)  # at exit, threads that capture are waited for: not for that of the parent
    assert os.waitpid(child, 0)[1] == 0
    lazy(rows, lengths=[6])
    wait_for(lazy, lazy.budgets[:1])
    print("whole")
    """)
    assert printed == ["5", "1", "whole"]


def test_a_process_forked_after_cuda_was_used_is_told_before_an_encoder_asks_for_it(monkeypatch):
    monkeypatch.setattr("torch.cuda._is_in_bad_fork", lambda: True)
    told = "forked after CUDA was used; .* create the encoder in the worker"
    with pytest.raises(vg.errors.StaleGraphError, match=told):
        vg.options.Pool().bind(torch.device("cuda", 0))
    vg.options.Pool().bind(torch.device("cpu"))  # tapes need no CUDA


@pytest.mark.skipif(shutil.which("file") is None, reason="the program `file` is not installed")
def test_the_cache_of_triton_depends_on_the_program_file(tmp_path):
    pytest.importorskip("triton", reason="needs Triton")
    code = "from triton.runtime.build import platform_key; print(platform_key())"

    def key(path):
        run = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PATH": path}, stdout=-1, check=True)
        return run.stdout

    assert key(os.environ["PATH"]) != key(str(tmp_path))
    (tmp_path / "file").symlink_to(shutil.which("file"))
    assert key(os.environ["PATH"]) == key(str(tmp_path))
