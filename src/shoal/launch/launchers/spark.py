"""Launcher on Spark: a barrier stage with a task for each rank, in the program's own session or in a new one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import LaunchError, ShoalError
from shoal.launch.environment import defaults
from shoal.launch.launchers.argument import parsed
from shoal.launch.launchers.base import Submission, library
from shoal.launch.launchers.engine_rank import RankEnd, RankLook
from shoal.launch.launchers.reports import restarted
from shoal.launch.launchers.spark_task import BarrierTask, TaskChannel
from shoal.launch.signals import Signals
from shoal.launch.supervise.recovery import verdict

_LOOPBACK = "127.0.0.1"
_LEAST_JAVA = 17  # the oldest version for Spark 4
_LOOK_SECONDS, _SLOT_SECONDS = 0.2, 30.0
_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class SparkSettings:
    """Settings of `--on spark:KEY=VALUE,...`."""

    master: str = ""  # of a new session; empty: the master of spark-submit, or local[N]
    threads: int = 1  # of a rank


def render(submission: Submission) -> Mapping[str, str]:
    """Describe the barrier stage that would run. Raises: CommandError for invalid settings."""
    settings = parsed(SparkSettings, "spark", submission.options)
    where = settings.master or f"the active session, spark-submit's, or local[{submission.num_processes}]"
    return {
        "spark": f"master:        {where}\n"
        f"barrier stage: {submission.num_processes} tasks, {settings.threads} thread(s) each\n"
        f"in each task:  shoal {' '.join(submission.arguments)}\n"
    }


def start(submission: Submission, signals: Signals) -> int:
    """Start the ranks in tasks, show rank 0's output, and restart all ranks if one is lost."""
    settings = parsed(SparkSettings, "spark", submission.options)
    with _session(settings, submission) as session, signals.handled():  # a second time: py4j installs its own handlers
        run = SparkRun(session, settings, submission, signals)
        try:
            return run.train()
        finally:
            run.close()


@contextlib.contextmanager
def _session(settings: SparkSettings, submission: Submission) -> Iterator[Any]:
    """Provide the active session, or a new one that ends with the run. Raises: LaunchError."""
    sql = library("spark", "pyspark.sql", submission)
    active = sql.SparkSession.getActiveSession()
    if active is not None:
        if not hasattr(active, "sparkContext"):
            raise LaunchError(
                given="an active session of Spark Connect",
                conflict="it has no barrier stages of a program's own",
                remedy="start the program with spark-submit, or where the driver runs",
            )
        yield active
        return
    _refuse_without_java(os.environ)
    with defaults(os.environ, {"PYSPARK_PYTHON": sys.executable}):
        builder, variables = sql.SparkSession.builder.appName(f"shoal {submission.name}"), {}
        if settings.master or "PYSPARK_GATEWAY_PORT" not in os.environ:  # spark-submit sets these itself
            master = settings.master or f"local[{submission.num_processes}]"
            builder = builder.master(master)
            builder = builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
            if master.startswith("local"):
                variables["SPARK_LOCAL_IP"] = _LOOPBACK
                builder = builder.config("spark.driver.bindAddress", _LOOPBACK).config("spark.driver.host", _LOOPBACK)
        try:
            with defaults(os.environ, variables):
                session = builder.getOrCreate()
        except Exception as error:
            said = str(error).strip().split("\n")[0][:300]
            raise LaunchError(
                given=f"a Spark session with master={settings.master or 'its default'}",
                conflict=f"{type(error).__name__}: {said}",
                remedy="check the master's address, and that pyspark is of the cluster's version",
            ) from None
        try:
            yield session
        finally:
            session.stop()


def _refuse_without_java(variables: Mapping[str, str]) -> None:
    """Raise LaunchError without a Java of a version that Spark supports."""
    home = variables.get("JAVA_HOME", "")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java", path=variables.get("PATH"))
    given = f"JAVA_HOME={home}" if home else "--on spark"
    remedy = f"install a Java runtime of version {_LEAST_JAVA} or newer, and set JAVA_HOME to its folder"
    if java is None or not os.access(java, os.X_OK):
        raise LaunchError(given=given, conflict="there is no Java here, and Spark needs one", remedy=remedy)
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    version = re.search(r'version "(?:1\.)?(\d+)', said)
    if version is not None and int(version[1]) < _LEAST_JAVA:
        raise LaunchError(
            given=f"{java} of version {version[1]}", conflict="Spark 4 does not support this version", remedy=remedy
        )


def _slots(context: Any) -> int | None:
    """Return the number of tasks that the cluster can run at once; None if unknown."""
    with contextlib.suppress(Exception):
        inner = context._jsc.sc()
        return int(inner.maxNumConcurrentTasks(inner.resourceProfileManager().defaultResourceProfile()))
    return None


@dataclass
class SparkRun:
    """Barrier stages of a run's ranks, and the watch over them."""

    session: Any
    settings: SparkSettings
    submission: Submission
    signals: Signals
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    _channel: TaskChannel = field(init=False)

    def __post_init__(self) -> None:
        self._wanted = self.submission
        host = self.session.sparkContext.getConf().get("spark.driver.host", "127.0.0.1")
        self._channel = TaskChannel(host, self._secret)

    def train(self) -> int:
        """Run stages until the run ends and return its exit code. Spark itself never restarts a stage with results."""

        def once(_: int) -> tuple[int, ShoalError | None]:
            context = self.session.sparkContext
            slots = _slots(context)
            if slots is not None:
                self.submission = self._wanted.with_what_is_there(slots)
            # Another executor may replace a lost one. Spark itself retries only after 15 s, and then for minutes.
            number, deadline = self.submission.num_processes, time.monotonic() + _SLOT_SECONDS
            while (slots := _slots(context)) is not None and slots < number:
                if time.monotonic() > deadline or str(context.master).startswith("local["):
                    raise LaunchError(
                        given=f"{number} ranks on Spark ({context.master})",
                        conflict=f"a barrier stage runs all of its tasks at once, and there is room for {slots}",
                        remedy="use fewer --devices, or more executors or cores (spark.executor.instances, "
                        "spark.executor.cores)",
                    )
                time.sleep(_LOOK_SECONDS)
            return verdict([end.ended() for end in self._trained()], self.signals)

        return restarted(self.submission, self.signals, once)

    def close(self) -> None:
        """Close the connections to the tasks."""
        self._channel.close()

    def _trained(self) -> list[RankEnd]:
        """Run one barrier stage to its end."""
        stages: list[list[RankEnd]] = []
        from pyspark import InheritableThread

        group = f"shoal-{secrets.token_hex(4)}"
        work = InheritableThread(target=lambda: stages.append(self._stage(group)), daemon=True)
        work.start()
        handed_on, since = 0, 0.0
        while work.is_alive():
            work.join(_LOOK_SECONDS)
            if len(self.signals.received) > handed_on:
                handed_on, since = len(self.signals.received), time.monotonic()
                self._channel.tell(signal.SIGKILL if self.signals.twice else signal.SIGTERM)
            if handed_on and time.monotonic() - since > 2 * _PATIENCE_SECONDS:
                self.session.sparkContext.cancelJobGroup(group)
        return stages[0]

    def _stage(self, group: str) -> list[RankEnd]:
        at, context = self.submission, self.session.sparkContext
        context.setJobGroup(group, f"shoal {at.name}", interruptOnCancel=True)
        number, logs = at.num_processes, str(at.out / "logs")
        channel, threads = self._channel.address, self.settings.threads
        task = BarrierTask(at.arguments, str(at.folder), logs, channel, self._secret, threads)
        try:
            texts = context.parallelize(range(number), number).barrier().mapPartitions(task).collect()
        except Exception as error:
            said = " ".join(str(error).rpartition("SparkException: ")[2].split())[:300]
            return [RankEnd(0, "Spark", gone=f"was lost with its stage: {said}")]
        values = [json.loads(text) for text in texts]
        return [RankEnd(value.pop("rank"), "Spark", RankLook(**value)) for value in values]
