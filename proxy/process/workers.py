"""The launcher of `--workers N`: it starts N proxies on one port, watches and replaces them.

To a worker it is a service manager that speaks systemd's protocols: it holds the worker's sockets
(`LISTEN_FDS`), and hears by datagrams (`NOTIFY_SOCKET`) that one serves, or has been replaced.
"""

from __future__ import annotations

import logging
import math
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from functools import partial

from proxy.process import signals
from proxy.process.hot_restart import START_S, exit_text
from proxy.process.notify import Notifier
from proxy.process.slots import FIRST_PAUSE_S, LONGEST_PAUSE_S, Processes, Worker

END_S = 10.0
"""A worker that has not ended so long after the second signal is killed: it may hang."""
REPLACE_S = START_S + 30.0
"""A worker that has not said by then what became of its hot restart ends the round."""
_ENDS = (signal.SIGTERM, signal.SIGINT)
_log = logging.getLogger(__name__)


class Launcher:
    """N workers, from the first start to the last end."""

    def __init__(self, workers: Sequence[Worker], notifier: Notifier) -> None:
        self._workers, self._notifier = workers, notifier
        self._selector = selectors.DefaultSelector()
        self._processes = Processes(self._selector)
        self._round: list[Worker] = []
        """Whom a round of hot restarts has still to replace; the first one's turn ends then:"""
        self._turn_ends_s = 0.0
        self._kill_s = math.inf
        self._has_served = self._is_ready = self._is_stopping = False
        self._status = 0

    def run(self) -> int:
        """Until a signal ends all, or the first worker does not come up; the exit status."""
        with self._selector, signals.told_by((*_ENDS, *signals.KEPT, signal.SIGCHLD)) as told:
            self._selector.register(told, selectors.EVENT_READ, partial(self._signalled, told))
            for worker in self._workers:
                heard = partial(self._hear, worker)
                self._selector.register(worker.hears, selectors.EVENT_READ, heard)
            while self._processes.alive or not self._is_stopping:
                for worker in self._down():
                    if worker.due_s <= time.monotonic():
                        worker.pid = self._processes.start(worker, partial(self._ended, worker))
                ready = self._selector.select(self._wait_s())
                self._processes.reap()
                for key, _ in ready:
                    key.data()
                if self._round and time.monotonic() > self._turn_ends_s:
                    self._end_round("it does not say what became of it")
                if time.monotonic() > self._kill_s:
                    self._kill()
        self._notifier.ended()
        return self._status

    def _down(self) -> Sequence[Worker]:
        """Workers to start. The first goes first: what makes all of them fail is said once."""
        wanted = self._workers if self._has_served else self._workers[:1]
        return [each for each in wanted if each.pid is None and not self._is_stopping]

    def _wait_s(self) -> float | None:
        moments = [worker.due_s for worker in self._down()]
        moments += [self._turn_ends_s] if self._round else []
        moments += [self._kill_s] if self._kill_s < math.inf else []
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _ended(self, worker: Worker, pid: int) -> None:
        self._hear(worker)  # its last words may name a successor
        status = self._processes.forget(pid)
        self._processes.end_orphans()
        if worker.pid != pid:
            return  # another one has taken over
        worker.pid, worker.serves = None, False
        if self._is_stopping:
            return
        if not self._has_served and status > 0:  # it has said why
            self._is_stopping, self._status = True, status
            return
        if worker in self._round[:1]:
            self._end_round("its process ended")
        how = (worker.number, pid, exit_text(status), worker.pause_s)
        _log.error("worker %d: process %d %s; it starts again in %g s", *how)
        worker.due_s = time.monotonic() + worker.pause_s
        worker.pause_s = min(LONGEST_PAUSE_S, 2 * worker.pause_s)

    def _hear(self, worker: Worker) -> None:
        for name, value in worker.told():
            if name == "READY":
                worker.pause_s, worker.serves, self._has_served = FIRST_PAUSE_S, True, True
                self._tell_ready()
            elif name == "MAINPID":
                self._replaced(worker, int(value))
            elif name == "STATUS" and value and worker in self._round[:1]:
                self._end_round(value)

    def _tell_ready(self) -> None:
        if self._is_ready or not all(worker.serves for worker in self._workers):
            return
        self._is_ready = True
        try:
            self._notifier.started(replaces=False)
        except OSError as error:
            _log.error("pid_file = %r: %s", error.filename, error.strerror)
            self._status = 1
            self._stop(signal.SIGTERM)
        else:
            _log.info("%d workers serve", len(self._workers))

    def _replaced(self, worker: Worker, pid: int) -> None:
        worker.pid = self._processes.watch(pid, partial(self._ended, worker))
        if self._is_stopping:
            self._processes.send(signal.SIGTERM, self._processes.alive.keys() & {pid})
        elif worker in self._round[:1]:
            del self._round[0]
            self._replace_next()

    def _signalled(self, told: socket.socket) -> None:
        (number,) = told.recv(1)
        if number in _ENDS:
            self._stop(signal.Signals(number))
        elif number == signal.SIGHUP:
            self._processes.send(signal.SIGHUP, [w.pid for w in self._workers if w.pid])
        elif number == signal.SIGUSR2 and self._round:
            _log.warning("hot restart refused: one is under way")
        elif number == signal.SIGUSR2 and not self._is_stopping:
            self._round = list(self._workers)
            self._replace_next()

    def _stop(self, number: signal.Signals) -> None:
        if self._is_stopping:
            self._kill_s = min(self._kill_s, time.monotonic() + END_S)
            left = ", ".join(map(str, self._processes.alive))
            _log.warning("process %s has not ended, and is killed in %g s", left, END_S)
        self._is_stopping = True
        self._round.clear()
        self._processes.send(number, self._processes.alive)

    def _kill(self) -> None:
        self._kill_s = math.inf
        for pid in self._processes.alive:
            _log.error("process %d does not end, and is killed", pid)
        self._processes.send(signal.SIGKILL, self._processes.alive)

    def _replace_next(self) -> None:
        """Ask the next one; who is down starts anew in any case."""
        self._round = [worker for worker in self._round if worker.pid]
        if self._round:
            self._turn_ends_s = time.monotonic() + REPLACE_S
            self._processes.send(signal.SIGUSR2, [self._round[0].pid or 0])
        else:
            _log.info("hot restart: every worker has been replaced")

    def _end_round(self, why: str) -> None:
        left = ", ".join(str(worker.number) for worker in self._round)
        _log.error("hot restart ended, worker %s carry on as they were: %s", left, why)
        self._round.clear()
