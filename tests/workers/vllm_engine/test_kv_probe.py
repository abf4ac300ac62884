"""Which transports UCX's log names; the probe itself runs in `orchestrator doctor`'s test."""

from workers.vllm_engine.kv_probe import carriers, transports

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


def test_carriers_are_those_of_long_writes_to_another_process():
    rows = """
[1] [vm:1:0]   | receiver-1 self cfg#0              |
[1] [vm:1:0]   | remote memory write by ucp_put*    |
[1] [vm:1:0]   | 0..inf | zero-copy | cma/memory    |
[1] [vm:1:0]   | receiver-1 inter-node cfg#1        |
[1] [vm:1:0]   | remote memory write by ucp_put*    |
[1] [vm:1:0]   | 0..8184 | short | rc_mlx5/mlx5_0:1 |
[1] [vm:1:0]   | 8185..inf | zero-copy | rc_mlx5/mlx5_1:1 |
[1] [vm:1:0]   | receiver-1 inter-node cfg#1        |
[1] [vm:1:0]   | active message by ucp_am_send*     |
[1] [vm:1:0]   | 0..inf | multi-frag | tcp/eth0     |
"""
    assert carriers(rows) == ["rc_mlx5/mlx5_1:1"] and carriers(LOG) == []
