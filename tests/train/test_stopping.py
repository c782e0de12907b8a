import os
import signal

import pytest

from piper_kernels.train.stopping import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_request_notes_the_first_signal_and_obeys_the_second(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.is_made
        os.kill(os.getpid(), number)
        assert stop.is_made
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before
