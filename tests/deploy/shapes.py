"""Fields that KubeRay, Kubernetes and Compose accept, as far as our files use them.

A shape is a dictionary of field -> shape, where `[shape]` is a list, a tuple the allowed values, a
type that type, `ANY` anything, and a field that ends in `!` is required. Written from the projects'
own references: KubeRay's API reference of `ray.io/v1`, Kubernetes' of `v1`, and the Compose
specification.
"""

import re
from collections.abc import Iterator
from typing import Any

ANY = object()
STRINGS = {"*": str}

QUANTITY = re.compile(r"\d+(\.\d+)?(m|[KMGT]i?)?")
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")

RESOURCES = {"requests": {"*": QUANTITY}, "limits": {"*": QUANTITY}}
CONTAINER = {
    "name!": NAME,
    "image!": str,
    "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
    "command": [str],
    "args": [str],
    "env": [
        {
            "name!": str,
            "value": str,
            "valueFrom": {"secretKeyRef": {"name!": NAME, "key!": str, "optional": bool}},
        }
    ],
    "ports": [{"containerPort!": int, "name": NAME, "protocol": ("TCP", "UDP")}],
    "resources!": RESOURCES,
    "securityContext": {
        "privileged": bool,
        "runAsUser": int,
        "capabilities": {"add": [str], "drop": [str]},
        "procMount": ("Default", "Unmasked"),
        "seccompProfile": {"type!": ("RuntimeDefault", "Unconfined", "Localhost")},
        "appArmorProfile": {"type!": ("RuntimeDefault", "Unconfined", "Localhost")},
    },
    "volumeMounts": [{"name!": NAME, "mountPath!": str, "readOnly": bool, "subPath": str}],
}
POD = {
    "metadata": {"labels": STRINGS, "annotations": STRINGS},
    "spec!": {
        "containers!": [CONTAINER],
        "initContainers": [CONTAINER],
        "terminationGracePeriodSeconds": int,
        "nodeSelector": STRINGS,
        "tolerations": [ANY],
        "hostUsers": bool,
        "shareProcessNamespace": bool,
        "securityContext": {"fsGroup": int, "runAsUser": int, "runAsNonRoot": bool},
        "volumes": [
            {
                "name!": NAME,
                "configMap": {"name!": NAME},
                "secret": {"secretName!": NAME},
                "persistentVolumeClaim": {"claimName!": NAME},
                "emptyDir": {"medium": str, "sizeLimit": QUANTITY},
            }
        ],
    },
}
HEAD = {
    "template!": POD,
    "rayStartParams": STRINGS,
    "serviceType": ("ClusterIP", "NodePort", "LoadBalancer"),
    "enableIngress": bool,
    "headService": ANY,
    "labels": STRINGS,
    "resources": STRINGS,
}
WORKERS = {
    "groupName!": NAME,
    "replicas": int,
    "minReplicas!": int,
    "maxReplicas!": int,
    "numOfHosts": int,
    "idleTimeoutSeconds": int,
    "suspend": bool,
    "rayStartParams": STRINGS,
    "template!": POD,
    "scaleStrategy": {"workersToDelete": [str]},
    "labels": STRINGS,
    "resources": STRINGS,
}
METADATA = {"name!": NAME, "namespace": NAME, "labels": STRINGS, "annotations": STRINGS}
KINDS: dict[tuple[str, str], Any] = {
    ("ray.io/v1", "RayCluster"): {
        "headGroupSpec!": HEAD,
        "workerGroupSpecs": [WORKERS],
        "rayVersion": str,
        "enableInTreeAutoscaling": bool,
        "autoscalerOptions": ANY,
        "gcsFaultToleranceOptions": ANY,
        "headServiceAnnotations": STRINGS,
        "authOptions": {"mode": ("disabled", "token")},
        "upgradeStrategy": ANY,
        "managedBy": str,
        "suspend": bool,
    },
    ("v1", "Service"): {
        "selector!": STRINGS,
        "type": ("ClusterIP", "NodePort", "LoadBalancer"),
        "ports!": [{"name": NAME, "port!": int, "targetPort": int, "protocol": ("TCP", "UDP")}],
    },
    ("v1", "PersistentVolumeClaim"): {
        "accessModes!": [("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")],
        "storageClassName": str,
        "resources!": RESOURCES,
    },
}

SERVICE = {
    "image": str,
    "build": {"context": str, "dockerfile": str, "args": STRINGS},
    "command": [str],
    "entrypoint": [str],
    "environment": {"*": str},
    "ports": [re.compile(r"[\d.]+:(\d+|\$\{\w+:-\d+\})(:\d+)?")],
    "volumes": [re.compile(r"[a-z./][\w./-]*:/[\w./-]*(:ro)?")],
    "depends_on": {
        "*": {
            "condition!": (
                "service_started",
                "service_healthy",
                "service_completed_successfully",
            )
        }
    },
    "healthcheck": {
        "test!": [str],
        "interval": re.compile(r"\d+s"),
        "timeout": re.compile(r"\d+s"),
        "retries": int,
        "start_period": re.compile(r"\d+s"),
    },
    "restart": ("no", "always", "on-failure", "unless-stopped"),
    "shm_size": re.compile(r"\d+[kmg]b?"),
    "cap_add": [str],
    "security_opt": [str],
    "networks": {"*": {"aliases": [NAME]}},
    "profiles": [str],
    "ipc": str,
    "deploy": {
        "replicas": int,
        "resources": {
            "limits": {"cpus": str, "memory": str},
            "reservations": {
                "devices": [
                    {"driver": str, "count": ANY, "capabilities!": [str], "device_ids": [str]}
                ]
            },
        },
    },
}
COMPOSE = {
    "name": NAME,
    "services!": {"*": SERVICE},
    "volumes": {"*": {"driver": str, "driver_opts": STRINGS}},
    "networks": {"*": ANY},
}


def faults(value: Any, shape: Any, at: str = "") -> Iterator[str]:
    """Return what of `value` is not as `shape` says: one line each, with its place."""
    match shape:
        case dict():
            yield from _of_object(value, shape, at)
        case list() if isinstance(value, list):
            for index, each in enumerate(value):
                yield from faults(each, shape[0], f"{at}[{index}]")
        case list():
            yield f"{at}: no list: {value!r}"
        case tuple() if value not in shape:
            yield f"{at}: {value!r} is none of {shape}"
        case re.Pattern() if not (isinstance(value, str) and shape.fullmatch(value)):
            yield f"{at}: {value!r} does not look like {shape.pattern}"
        case type() if type(value) is not shape:
            yield f"{at}: {value!r} is no {shape.__name__}"


def _of_object(value: Any, shape: dict[str, Any], at: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{at}: no object: {value!r}"
        return
    known = {name.rstrip("!"): inner for name, inner in shape.items()}
    for name in shape:
        if name.endswith("!") and name[:-1] not in value:
            yield f"{at}: lacks {name[:-1]!r}"
    for name, inner in value.items():
        if name not in known and "*" not in known:
            yield f"{at}: unknown field {name!r}"
        else:
            yield from faults(inner, known.get(name, known.get("*")), f"{at}.{name}")
