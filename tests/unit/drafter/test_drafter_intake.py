"""The thread that takes packs in: it ends when it is told to, whatever it was doing."""

from __future__ import annotations

import threading
from pathlib import Path

from drafter_cases import CPU

from protocol.messages import PROTOCOL_VERSION, DrafterHello
from services.drafter.intake import Intake
from services.link import Link
from services.transport.reader import SlotReader

DEADLINE_S = 20.0
HELLO = DrafterHello(
    incarnation="drafter-1",
    seq=0,
    protocol=PROTOCOL_VERSION,
    fingerprint="0" * 64,
    host="h",
    index=None,
    inbox="ipc:///nowhere",
)


class ClosedMeanwhile(Link):
    """Lets `closer` close the intake while its thread asks for the version, before it gets it."""

    closer: threading.Thread | None = None
    asked = threading.Event()

    @property
    def version(self) -> int:
        closer, self.closer = self.closer, None
        if closer is not None:
            before = super().version
            closer.start()
            self.asked.set()
            self.wait(before, DEADLINE_S)
        return super().version


def test_a_close_while_the_thread_turns_is_not_missed(tmp_path: Path) -> None:
    link = ClosedMeanwhile(f"ipc://{tmp_path / 'control'}", HELLO)
    intake = Intake(link, SlotReader(tmp_path, CPU), threading.RLock(), lambda *_: True)
    closer = link.closer = threading.Thread(target=intake.close, daemon=True)
    link.start()
    intake.start()
    assert link.asked.wait(DEADLINE_S)
    closer.join(DEADLINE_S)
    assert not closer.is_alive(), "the thread waits for a wake-up that it has slept through"
    link.close("the test is over")
