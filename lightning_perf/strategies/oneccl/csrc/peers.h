// Whether the processes of other ranks still live, as far as this process can see them.
#pragma once

#include <sys/types.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace lightning_perf {

// A rank whose process is visible from here: on this machine, in this namespace of processes.
struct Peer {
  int in_group, rank;  // its rank in the group, and in the run
  pid_t pid;
  std::string started;  // in the clock ticks of /proc, so that a number used again is told apart
};

inline bool has_ended(const Peer& peer) {
  std::ifstream file("/proc/" + std::to_string(peer.pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return true;
  // The name of the program comes second, in brackets, and may hold anything.
  std::istringstream fields(line.substr(line.rfind(')') + 1));
  std::string state, field;
  fields >> state;
  for (int skipped = 4; skipped <= 22; ++skipped) fields >> field;
  // Z: it has ended, and its parent has not looked yet.
  return state == "Z" || state == "X" || field != peer.started;
}

}  // namespace lightning_perf
