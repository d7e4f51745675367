"""Runs the scenarios: all engines of a group at once in memory, one awake at a time, round by round."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable

from cpu_peers.engines import BLOCK_SIZE, DRIVERS, ENGINES, NUM_BLOCKS, VARIANTS, Machinery
from cpu_peers.errors import EngineFailed
from cpu_peers.process import DriverProcess, EngineProcess, ServerProcess
from cpu_peers.results import Limits, Results
from cpu_peers.scenarios import SCENARIOS, Scenario, fill_cache, random_prompts
from cpu_peers.venvs import ensure_installed

_SLOW_START_S = 15.0
"""An engine that takes longer to start is started only as often as it must be."""

_LIMITS_DEADLINE_S = 120.0
_AGREEMENT_PROMPTS = 32

Say = Callable[[str], None]


class Runner:
    """Measures, and notes failures instead of raising them.

    Args:
        machinery: how engines are started.
        engines: names of those that take part.
        rounds: of each scenario.
        say: told what is going on.
    """

    def __init__(self, machinery: Machinery, engines: Iterable[str], rounds: int, say: Say) -> None:
        self._machinery = machinery
        self._engines = set(engines)
        self._rounds = rounds
        self._say = say
        self.results = Results()

    def install(self) -> None:
        """Make the environments of all engines that take part."""
        for name in sorted(self._engines):
            engine = ENGINES[name]
            try:
                ensure_installed(engine, self._machinery.venv(engine), self._machinery.logs / f"{name}-install.log")
            except EngineFailed as error:
                for variant in VARIANTS.values():
                    if variant.engine == name:
                        self._note(variant.name, error)

    def measure_limits(self) -> None:
        """Measure the machine."""
        self._say("measuring the limits of the machine")
        command = [sys.executable, str(DRIVERS / "limits_driver.py"), str(self._machinery.threads)]
        try:
            finished = subprocess.run(command, capture_output=True, text=True, timeout=_LIMITS_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._note("limits", EngineFailed(f"not measured within {_LIMITS_DEADLINE_S:.0f} s"))
            return
        if finished.returncode:
            self._note("limits", EngineFailed((finished.stderr.strip().splitlines() or ["failed"])[-1]))
            return
        self.results.limits = Limits(**json.loads(finished.stdout))

    def run(self, names: list[str]) -> None:
        """Measure the scenarios of these names, group by group."""
        scenarios = [SCENARIOS[name] for name in SCENARIOS if name in names]
        self.results.scenarios = [scenario.name for scenario in scenarios]
        for group in dict.fromkeys(scenario.group for scenario in scenarios):
            members = [scenario for scenario in scenarios if scenario.group == group]
            self._run_group([scenario for scenario in members if scenario.measures])
            for scenario in members:
                self._run_starts(scenario)

    def _run_group(self, scenarios: list[Scenario]) -> None:
        names = [name for name in VARIANTS if any(name in s.measures for s in scenarios) and self._takes_part(name)]
        processes: dict[str, EngineProcess] = {}
        try:
            for name in names:
                self._start(name, processes)
            self._compare_first_tokens(processes)
            for round_number in range(self._rounds):
                for scenario in scenarios:
                    self._run_round(scenario, round_number, processes)
            for name, process in processes.items():
                self._note_memory(name, process)
        finally:
            for process in processes.values():
                process.close()

    def _run_round(self, scenario: Scenario, round_number: int, processes: dict[str, EngineProcess]) -> None:
        """One round; who comes first changes from round to round."""
        names = [name for name in scenario.measures if name in processes]
        turn = round_number % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            self._say(f"round {round_number + 1} of {self._rounds}: {scenario.title}: {VARIANTS[name].label}")
            process = processes[name]
            process.resume()
            try:
                self.results.add(scenario.name, name, scenario.measures[name](process, round_number))
                process.pause()
            except EngineFailed as error:
                self._note(name, EngineFailed(f"{scenario.title}: {error}"))
                processes.pop(name).close()

    def _compare_first_tokens(self, processes: dict[str, EngineProcess]) -> None:
        """An engine that computes something else than the others is no peer: see what share of tokens is the same."""
        prompts = random_prompts(_AGREEMENT_PROMPTS, 64, "agreement")
        tokens: dict[str, list[list[int]]] = {}
        for name, process in list(processes.items()):
            if not isinstance(process, DriverProcess):
                continue
            process.resume()
            try:
                _, tokens[name] = process.generate(prompts, 1)
                process.pause()
            except EngineFailed as error:
                self._note(name, error)
                processes.pop(name).close()
        for name, theirs in tokens.items():
            if "ksana" in tokens:
                same = sum(a == b for a, b in zip(theirs, tokens["ksana"], strict=True))
                self.results.agreement[name] = same / len(prompts)

    def _run_starts(self, scenario: Scenario) -> None:
        for round_number in range(self._rounds):
            for name in scenario.started:
                known = self.results.starts.get(name, [])
                if self._takes_part(name) and not (known and max(known) > _SLOW_START_S):
                    self._say(f"round {round_number + 1} of {self._rounds}: start: {VARIANTS[name].label}")
                    self._start_once(name, last=round_number + 1 == self._rounds)

    def _start_once(self, name: str, *, last: bool) -> None:
        processes: dict[str, EngineProcess] = {}
        self._start(name, processes)
        for process in processes.values():
            try:
                process.resume()
                if last and isinstance(process, ServerProcess):
                    fill_cache(process, NUM_BLOCKS * BLOCK_SIZE)
                if last:
                    self._note_memory(name, process)
            except EngineFailed as error:
                self._note(name, error)
            finally:
                process.close()

    def _start(self, name: str, processes: dict[str, EngineProcess]) -> None:
        variant = VARIANTS[name]
        self._say(f"starting {variant.label}")
        try:
            process = variant.start(self._machinery, variant)
        except EngineFailed as error:
            self._note(name, error)
            return
        self.results.starts.setdefault(name, []).append(process.start_seconds)
        process.pause()
        processes[name] = process

    def _note_memory(self, name: str, process: EngineProcess) -> None:
        """The most that was seen: after work rather than before it."""
        try:
            seen = process.resident_bytes()
        except EngineFailed as error:
            self._note(name, error)
            return
        self.results.resident[name] = max(seen, self.results.resident.get(name, 0))

    def _takes_part(self, name: str) -> bool:
        return VARIANTS[name].engine in self._engines and name not in self.results.failures

    def _note(self, name: str, error: EngineFailed) -> None:
        self._say(f"{name} failed: {error}")
        self.results.failures[name] = str(error)
