"""Which transports UCX's log names; the probe itself runs in `orchestrator doctor`'s test."""

from workers.vllm_engine.kv_probe import transports

LOG = """
[1.0] [vm:1 :1]   | put by ucp_put*(fast-completion) from host memory to host        |
[1.0] [vm:1 :1]   |    Range   |   Description   |        Config         |
[1.0] [vm:1 :1]   |    0..8184 | short           | rc_mlx5/mlx5_0:1      |
[1.0] [vm:1 :1]   |  8185..inf | zero-copy       | cma/memory            |
[1.0] [vm:1 :1]   | 65529..inf | zero-copy       | tcp/eth0              |
"""


def test_each_transport_is_named_once():
    assert transports(LOG + LOG) == ["cma/memory", "rc_mlx5/mlx5_0:1", "tcp/eth0"]
    assert transports("") == []
