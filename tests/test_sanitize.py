"""The program for compute-sanitizer, in the emulator: that it calls each kernel for what the kernel has."""

from __future__ import annotations

import pytest
import sanitize

import flash_wmma


def test_calls(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Backward with and without ``deterministic``, which has no gradient of a broadcast bias."""
    monkeypatch.setattr(sanitize, "CASES", sanitize.CASES[:2])
    monkeypatch.setattr(sanitize, "BIAS_SHAPES", ((1, 4, 70, 130), (130,)))
    sanitize.main(["--device", "cpu", "--head-dims", "16", "--kernel", "bwd_sm75", "--kernel", "wmma_v3"])
    # Of five problems in three dtypes, bfloat16 from sm_80 on, which the emulator stands for
    assert capsys.readouterr().out == "bwd_sm75: 27 calls, wmma_v3: 15 calls\n"


def test_other_errors_are_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object, **__: object) -> None:
        raise ValueError("q.shape: got (1, 2), allowed: (B, H, N, d)")

    monkeypatch.setattr(flash_wmma, "forward", wrong)
    with pytest.raises(ValueError, match=r"q\.shape"):
        sanitize.main(["--device", "cpu", "--head-dims", "16", "--kernel", "wmma_v3"])


def test_a_kernel_without_a_call_fails() -> None:
    with pytest.raises(AssertionError):
        sanitize.main(["--device", "cpu", "--head-dims", "400", "--kernel", "wmma_v3"])
    with pytest.raises(SystemExit):
        sanitize.main(["--kernel", "cpu"])
