"""Every scaler, by its name in the options; ValueError where its options do not fit."""

from __future__ import annotations

import os
from collections.abc import Callable

from planner.config.options import PlannerOptions
from planner.scalers.base import Scaler
from planner.scalers.exec import ExecScaler
from planner.scalers.file import FileScaler
from planner.scalers.noop import NoopScaler
from planner.scalers.virtual import VirtualScaler


def _file(options: PlannerOptions) -> Scaler:
    assert options.decision_file is not None, "the options have been checked"
    return FileScaler(options.decision_file)


def _kubernetes(options: PlannerOptions) -> Scaler:
    # The rest of the planner does without this folder, and mostly runs without its library.
    from planner.scalers.kubernetes.options import PARENT, KubernetesOptions
    from planner.scalers.kubernetes.scaler import KubernetesScaler

    path = options.kubernetes_kubeconfig
    return KubernetesScaler(
        KubernetesOptions(
            options.kubernetes_object or "",
            os.environ.get(PARENT, ""),
            options.kubernetes_namespace or "",
            "" if path is None else str(path),
            options.kubernetes_port,
        )
    )


SCALERS: dict[str, Callable[[PlannerOptions], Scaler]] = {
    "noop": lambda options: NoopScaler(),
    "file": _file,
    "exec": lambda options: ExecScaler(options.scaler_command),
    "virtual": lambda options: VirtualScaler(),
    "kubernetes": _kubernetes,
}
