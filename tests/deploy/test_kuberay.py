"""KubeRay's manifests, as far as they can be tried without a cluster."""

import json
import shlex
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # it ships no types
from tests.deploy.shapes import KINDS, METADATA, faults

from bridle.cli.config import load_config

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


@pytest.fixture(scope="module")
def objects():
    text = (DEPLOY / "kuberay" / "cluster.yaml").read_text()
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def containers(cluster):
    """Group -> its only container, and its pod's spec."""
    spec = cluster["spec"]
    pods = {"head": spec["headGroupSpec"]["template"]["spec"]}
    pods |= {group["groupName"]: group["template"]["spec"] for group in spec["workerGroupSpecs"]}
    return {name: (pod["containers"][0], pod) for name, pod in pods.items()}


def test_every_kuberay_object_has_only_fields_of_its_kind(objects):
    for each in objects.values():
        assert list(faults(each["metadata"], METADATA, each["kind"])) == []
        if each["kind"] == "ConfigMap":
            assert list(faults(each["data"], {"*": str}, "data")) == []
        else:
            shape = KINDS[each["apiVersion"], each["kind"]]
            assert list(faults(each["spec"], shape, each["kind"])) == []


def test_the_kuberay_config_map_equals_deploy_bridle_toml(objects, tmp_path):
    file = tmp_path / "bridle.toml"
    file.write_text(objects["ConfigMap"]["data"]["bridle.toml"])
    assert load_config(file) == load_config(DEPLOY / "bridle.toml")


def test_kuberay_workers_offer_the_ray_resource_of_the_config_and_the_head_does_not(objects):
    wanted = load_config(DEPLOY / "bridle.toml").executor.ray.resource
    [group] = objects["RayCluster"]["spec"]["workerGroupSpecs"]
    # KubeRay puts it on a command line of `ray start` as it is.
    [result] = shlex.split(group["rayStartParams"]["resources"])
    assert json.loads(result) == {wanted: 1}
    head = objects["RayCluster"]["spec"]["headGroupSpec"]["rayStartParams"]
    assert "resources" not in head
    assert head["num-cpus"] == "0"


def test_kuberay_mounts_have_volumes_and_the_data_path_of_the_config(objects):
    config = load_config(DEPLOY / "bridle.toml")
    for container, pod in containers(objects["RayCluster"]).values():
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted.keys() == volumes
        assert mounted["data"] == str(config.server.data)
        assert str(config.executor.ray.folder).startswith(f"{mounted['data']}/")


def test_labels_ports_and_claims_that_kuberay_objects_refer_to_exist(objects):
    head, pod = containers(objects["RayCluster"])["head"]
    labels = objects["RayCluster"]["spec"]["headGroupSpec"]["template"]["metadata"]["labels"]
    assert objects["Service"]["spec"]["selector"].items() <= labels.items()
    ports = {port["containerPort"] for port in head["ports"]}
    served = {port["targetPort"] for port in objects["Service"]["spec"]["ports"]}
    assert served == {load_config(DEPLOY / "bridle.toml").server.port}
    assert served <= ports
    named = {volume["name"]: volume for volume in pod["volumes"]}
    assert named["config"]["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
    claim = named["data"]["persistentVolumeClaim"]["claimName"]
    assert claim == objects["PersistentVolumeClaim"]["metadata"]["name"]


def test_kuberay_resource_requests_equal_limits(objects):
    for container, _ in containers(objects["RayCluster"]).values():
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_the_kuberay_ray_version_is_the_locked_one(objects):
    pins = (DEPLOY.parent / "requirements" / "ray.txt").read_text()
    assert f"ray=={objects['RayCluster']['spec']['rayVersion']} " in pins
