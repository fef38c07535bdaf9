"""The checks of deployment files find what is wrong with one."""

import pytest
from tests.deploy.shapes import COMPOSE, KINDS, faults

CLUSTER = KINDS["ray.io/v1", "RayCluster"]
POD = {
    "spec": {"containers": [{"name": "ray", "image": "i", "resources": {"limits": {"cpu": "4"}}}]}
}
HEAD = {"headGroupSpec": {"template": POD}}


def test_a_valid_cluster_spec_has_no_faults():
    assert list(faults(HEAD, CLUSTER)) == []


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, "lacks 'headGroupSpec'"),
        ({**HEAD, "workerGroupSpec": []}, "unknown field 'workerGroupSpec'"),
        ({**HEAD, "workerGroupSpecs": {}}, "no list"),
        ({**HEAD, "workerGroupSpecs": [{"groupName": "A_b"}]}, "'A_b' does not look like"),
        ({"headGroupSpec": {"template": POD, "rayStartParams": {"num-cpus": 0}}}, "0 is no str"),
        ({"headGroupSpec": {"template": POD, "serviceType": "IP"}}, "'IP' is none of"),
        ({**HEAD, "suspend": "yes"}, "'yes' is no bool"),
        ({"headGroupSpec": []}, "no object"),
    ],
)
def test_a_fault_of_a_deployment_file_is_reported_with_its_path(spec, said):
    found = list(faults(spec, CLUSTER, "spec"))
    assert any(said in fault for fault in found), found
    assert all(fault.startswith("spec") for fault in found)


def test_a_boolean_in_place_of_an_integer_is_reported():
    spec = {"services": {"a": {"deploy": {"replicas": True}}}}
    assert list(faults(spec, COMPOSE)) == [".services.a.deploy.replicas: True is no int"]
