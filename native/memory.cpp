#include "memory.hpp"

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

namespace zs {
namespace {

std::optional<uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // absent, or "max"
}

uint64_t sum_of(const std::string& path, const std::string& first, const std::string& second) {
  std::ifstream file(path);
  std::string key;
  uint64_t value = 0, sum = 0;
  while (file >> key >> value)
    if (key == first || key == second) sum += value;
  return sum;
}

uint64_t machine() {
  std::ifstream file("/proc/meminfo");
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string key;
    uint64_t kilobytes = 0;
    if (words >> key >> kilobytes && key == "MemAvailable:") return kilobytes << 10;
  }
  return UINT64_MAX;
}

// What one control group leaves: its limit, less what is used and cannot be reclaimed.
uint64_t left_in(const std::string& limit, const std::string& usage, const std::string& stat,
                 const std::string& prefix) {
  const std::optional<uint64_t> most = number_in(limit), used = number_in(usage);
  if (!most || !used) return UINT64_MAX;
  const uint64_t cache = std::min(*used, sum_of(stat, prefix + "inactive_file", prefix + "active_file"));
  const uint64_t held = *used - cache;
  return *most > held ? *most - held : 0;
}

}  // namespace

uint64_t available_memory() {
  uint64_t least = machine();
  std::ifstream groups("/proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {
    const size_t colon = line.find(':'), second = line.find(':', colon + 1);
    if (colon == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(colon + 1, second - colon - 1);
    const bool unified = controllers.empty();
    if (!unified && controllers.find("memory") == std::string::npos) continue;
    // In a container the path is often the host's and absent here; every ancestor limits too: all are asked.
    for (std::string path = line.substr(second + 1);; path.erase(path.rfind('/'))) {
      if (path == "/") path.clear();
      const std::string folder = (unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory") + path + "/";
      least = std::min(
          least, unified
                     ? left_in(folder + "memory.max", folder + "memory.current", folder + "memory.stat", "")
                     : left_in(folder + "memory.limit_in_bytes", folder + "memory.usage_in_bytes",
                               folder + "memory.stat", "total_"));
      if (path.empty() || path.rfind('/') == std::string::npos) break;
    }
  }
  return least;
}

}  // namespace zs
