"""Stopping waits for the coordinator's end and says meanwhile how far it is."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from protocol.files import FileLock
from services.local.status import Status
from services.local.stop import stop


def test_it_tells_what_it_waits_for_until_the_coordinator_is_gone(tmp_path):
    lock = FileLock(tmp_path / "coordinator.lock").acquire()
    told: list[Status] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.answer(b"")

        def do_GET(self):
            self.answer(json.dumps({"state": "stopping", "step": 3}).encode())

        def answer(self, body):
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    def tell(status: Status) -> None:
        told.append(status)
        if len(told) == 2:
            lock.release()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (tmp_path / "coordinator.json").write_text(
            json.dumps({"http": f"http://127.0.0.1:{server.server_address[1]}"})
        )
        stop(tmp_path, tell, every_s=0.01)
        server.shutdown()
    assert len(told) >= 2
    assert (told[0].state, told[0].step) == ("stopping", 3)
