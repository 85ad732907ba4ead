from cli.project import on, project
from fake_comparison import compare_fakes, cpu_clock

__all__ = ["compare_fakes", "cpu_clock", "on", "project"]
