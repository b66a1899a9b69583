from kvcache.transfer.pace import Pace, Speed, Throttle


def test_speed_follows_gains_at_once_and_losses_slowly() -> None:
    speed = Speed()
    assert speed.expected_s(1 << 30) == 0.0
    speed.learn(100 << 20, 0.001)
    speed.learn(100 << 20, 0.01)
    slower = speed.bytes_per_s
    assert (10 << 30) < slower < (100 << 20) / 0.001
    speed.learn(100 << 20, 0.0005)
    assert speed.bytes_per_s == (100 << 20) / 0.0005
    speed.learn(100, 1.0)  # says nothing
    assert speed.expected_s(100 << 20) == 0.0005


def test_naps_are_short_around_the_likely_end_only() -> None:
    pace = Pace(began=10.0, expected_s=0.003)
    assert not pace.is_ending(10.0) and pace.is_ending(10.0027)
    now, naps = 10.0, []
    while (nap_s := pace.nap_s(now)) is not None:
        naps.append(nap_s)
        now += nap_s
        assert now < 10.003 or nap_s < 0.00001
    assert max(naps) == pace.longest_nap_s and 10.004 < now < 10.006


def test_nothing_known_is_no_pace() -> None:
    pace = Pace(began=10.0, expected_s=0.0)
    assert pace.nap_s(10.0) is None and pace.is_ending(10.0)


def test_reads_beside_a_batch_keep_to_their_rate_and_others_do_not() -> None:
    busy = False
    throttle = Throttle(lambda: busy, max_bytes=1 << 30, bytes_per_s=1e9, staged_bytes_per_s=0.25e9)
    assert throttle.post_bytes() == 1 << 30 and throttle.least_s(1 << 30) == 0.0
    assert not throttle.posted(1 << 30, now=10.0) and throttle.admits(10.0)
    busy = True
    assert throttle.post_bytes() == 64 << 20 and throttle.least_s(10**9) == 1.0
    now, moved = 10.0, 0
    while now < 11.0:
        if throttle.admits(now):
            assert throttle.posted(10**6, now)
            moved += 10**6
        now += 0.0003  # a thread that looks now and then
    assert 0.7e9 < moved <= 1.001e9
    assert throttle.posted(10**6, 20.0, staged=True)  # and is placed by a kernel afterwards
    assert not throttle.admits(20.003) and throttle.admits(20.0041)
    assert throttle.least_s(10**9, staged=True) == 4.0
    busy = False
    assert throttle.admits(20.1) and not throttle.posted(1, 20.1)
