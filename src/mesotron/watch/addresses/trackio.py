"""trackio://PROJECT/RUN: a project of trackio's store on this machine, read where it is."""

from pathlib import Path

from mesotron.watch.address import address


@address(
    "trackio",
    form="PROJECT[/RUN]",
    about="trackio's store on this machine (`TRACKIO_DIR`), also during a run; not a Space",
    extra="trackio",
)
def trackio(place: str, folder: Path) -> Path:
    from trackio.sqlite_storage import SQLiteStorage

    project, _, run = place.strip("/").partition("/")
    file = Path(SQLiteStorage.get_project_db_path(project))
    if not file.is_file():
        raise ValueError(
            f"trackio has no project {project!r:.80} on this machine: {file} is missing"
        )
    if not run:
        return file

    runs = [str(one["name"]) for one in SQLiteStorage.get_run_records(project)]
    if run not in runs:
        raise ValueError(
            f"trackio's project {project} has no run {run!r:.80}: {', '.join(runs[:20])}"
        )

    return Path(f"{file}#{run}")
