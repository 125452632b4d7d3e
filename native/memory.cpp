#include "memory.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>

namespace zs {
namespace {

// C's files, not C++'s streams: a process may have loaded a library that brings streams of its own, and
// numbers were then read as 0 (seen with a CUDA build of torch).
std::string text_of(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"), &std::fclose);
  std::string text;
  char part[4096];
  while (file) {
    const size_t n = std::fread(part, 1, sizeof part, file.get());
    if (n == 0) break;
    text.append(part, n);
  }
  return text;
}

std::optional<uint64_t> number_at(const std::string& text, size_t at) {
  while (at < text.size() && (text[at] == ' ' || text[at] == '\t')) ++at;
  if (at >= text.size() || text[at] < '0' || text[at] > '9') return std::nullopt;  // "max", or nothing
  return std::strtoull(text.c_str() + at, nullptr, 10);
}

std::optional<uint64_t> number_in(const std::string& path) {
  return number_at(text_of(path), 0);
}

// The number behind `key` at the beginning of a line.
std::optional<uint64_t> number_of(const std::string& text, const std::string& key) {
  for (size_t at = 0; at < text.size(); at = text.find('\n', at) + 1) {
    if (text.compare(at, key.size(), key) == 0) return number_at(text, at + key.size());
    if (text.find('\n', at) == std::string::npos) break;
  }
  return std::nullopt;
}

uint64_t machine() {
  const std::optional<uint64_t> kilobytes = number_of(text_of("/proc/meminfo"), "MemAvailable:");
  return kilobytes ? *kilobytes << 10 : UINT64_MAX;
}

// What one control group leaves: its limit, less what is used and cannot be reclaimed.
uint64_t left_in(const std::string& limit, const std::string& usage, const std::string& stat,
                 const std::string& prefix) {
  const std::optional<uint64_t> most = number_in(limit), used = number_in(usage);
  if (!most || !used) return UINT64_MAX;
  const std::string facts = text_of(stat);
  const uint64_t files = number_of(facts, prefix + "inactive_file ").value_or(0) +
                         number_of(facts, prefix + "active_file ").value_or(0);
  const uint64_t held = *used - std::min(*used, files);
  return *most > held ? *most - held : 0;
}

}  // namespace

uint64_t available_memory() {
  uint64_t least = machine();
  const std::string groups = text_of("/proc/self/cgroup");
  for (size_t at = 0; at < groups.size();) {
    const size_t end = std::min(groups.find('\n', at), groups.size());
    const std::string line = groups.substr(at, end - at);
    at = end + 1;
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
