from kvcache.transfer.link.read_throttle import Throttle


def test_reads_beside_a_batch_keep_to_their_rate_and_others_do_not() -> None:
    busy = False
    throttle = Throttle(lambda: busy, max_bytes=1 << 30, bytes_per_s=1e9, staged_bytes_per_s=0.25e9)
    assert throttle.post_bytes() == 1 << 30
    throttle.posted(1 << 30, now=10.0)
    assert throttle.admits(10.0)
    busy = True
    assert throttle.post_bytes() == 64 << 20
    now, moved = 10.0, 0
    while now < 11.0:
        if throttle.admits(now):
            throttle.posted(10**6, now)
            moved += 10**6
        now += 0.0003  # a thread that looks now and then
    assert 0.7e9 < moved <= 1.001e9
    throttle.posted(10**6, 20.0, staged=True)  # and is placed by a kernel afterwards
    assert not throttle.admits(20.003) and throttle.admits(20.0041)
    busy = False
    throttle.posted(1 << 50, 20.1)
    assert throttle.admits(20.1)
