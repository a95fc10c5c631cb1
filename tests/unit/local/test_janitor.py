"""Only what dead incarnations left is removed."""

from services.lifecycle import hold_lock, new_incarnation
from services.local.janitor import sweep


def test_files_of_the_dead_go_and_those_of_the_living_stay(tmp_path):
    folder = tmp_path / "run"
    alive, dead = new_incarnation("target"), new_incarnation("target")
    lock = hold_lock(folder, alive)
    hold_lock(folder, dead).release()
    for name in (f"{alive}.arena", f"{dead}.arena", "target-unknown.arena"):
        (folder / name).write_bytes(bytes(100))
    assert sweep(folder) == 200
    assert sorted(file.name for file in folder.iterdir()) == [f"{alive}.arena", f"{alive}.lock"]
    lock.release()
    assert sweep(folder) == 100
    assert not folder.exists()


def test_a_folder_that_is_not_there_is_clean(tmp_path):
    assert sweep(tmp_path / "absent") == 0
