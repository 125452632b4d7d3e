#include "ptx.hpp"

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "fake.hpp"

namespace fake {
namespace {

constexpr size_t kBlock = 1, kThread = 2;  // registers

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t"), last = text.find_last_not_of(" \t");
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, at);) parts.push_back(trimmed(part));
  return parts;
}

uint64_t load(uint64_t at, int width) {
  switch (width) {
    case 1:
      return __atomic_load_n(reinterpret_cast<const uint8_t*>(at), __ATOMIC_RELAXED);
    case 4:
      return __atomic_load_n(reinterpret_cast<const uint32_t*>(at), __ATOMIC_RELAXED);
    default:
      return __atomic_load_n(reinterpret_cast<const uint64_t*>(at), __ATOMIC_RELAXED);
  }
}

}  // namespace

// What a verb makes of its operands, for a caller that calls it with a constant verb.
[[gnu::always_inline]] inline uint64_t Ptx::computed(Verb verb, int width, uint64_t a, uint64_t b,
                                                     uint64_t c) {
  const uint64_t bits = 8 * static_cast<uint64_t>(width);
  switch (verb) {
    case Verb::mov:
      return a;
    case Verb::add:
      return a + b;
    case Verb::sub:
      return a - b;
    case Verb::bit_and:
      return a & b;
    case Verb::bit_or:
      return a | b;
    case Verb::bit_xor:
      return a ^ b;
    case Verb::bit_not:
      return ~a;
    case Verb::max:
      return std::max(a, b);
    case Verb::shl:
      return b < bits ? a << b : 0;
    case Verb::shr:
      return b < bits ? a >> b : 0;
    case Verb::mul:
      return a * b;
    case Verb::mad:
      return a * b + c;
    case Verb::xor3:
      return a ^ b ^ c;
    case Verb::selp:
      return c != 0 ? a : b;
    case Verb::greater:
      return a > b;
    case Verb::greater_equal:
      return a >= b;
    case Verb::equal:
      return a == b;
    case Verb::not_equal:
      return a != b;
    default:
      return 0;
  }
}

size_t Ptx::fresh(uint64_t value) {
  registers_.emplace_back().fill(value);
  return registers_.size() - 1;
}

size_t Ptx::operand(const std::string& word, uint64_t* offset) {
  if (word.front() == '[') {
    const std::vector<std::string> parts = split(word.substr(1, word.size() - 2), '+');
    if (parts.size() > 1) *offset = std::stoull(parts[1], nullptr, 0);
    return names_.at(parts[0]);
  }
  if (word == "%ctaid.x") return kBlock;
  if (word == "%tid.x") return kThread;
  return word.front() == '%' ? names_.at(word) : fresh(std::stoull(word, nullptr, 0));
}

Ptx::Instruction Ptx::instruction(std::string line) {
  static const std::map<std::string, Verb> kVerbs = {
      {"mov", Verb::mov},    {"add", Verb::add},     {"sub", Verb::sub},    {"and", Verb::bit_and},
      {"or", Verb::bit_or},  {"xor", Verb::bit_xor}, {"max", Verb::max},    {"not", Verb::bit_not},
      {"shl", Verb::shl},    {"shr", Verb::shr},     {"mul", Verb::mul},    {"mad", Verb::mad},
      {"lop3", Verb::xor3},  {"selp", Verb::selp},   {"ld", Verb::load},    {"st", Verb::store},
      {"bra", Verb::branch}, {"ret", Verb::end},     {"gt", Verb::greater}, {"ge", Verb::greater_equal},
      {"eq", Verb::equal},   {"ne", Verb::not_equal}};
  Instruction result;
  result.line = line;
  if (line.front() == '@') {
    const size_t space = line.find(' ');
    result.guard_inverted = line[1] == '!';
    const size_t name = result.guard_inverted ? 2 : 1;
    result.guard = names_.at(line.substr(name, space - name));
    line = line.substr(space + 1);
  }
  const size_t space = line.find(' ');
  std::vector<std::string> words = split(line.substr(0, space), '.');
  if (words[0] == "setp") {
    words.erase(words.begin());
    result.joined = words[1] == "and";
  }
  const auto verb = kVerbs.find(words[0]);
  if (verb == kVerbs.end()) throw std::invalid_argument("unknown: " + result.line);
  result.verb = verb->second;
  if (words.back().ends_with("64")) result.width = 8;
  if (words.back() == "u8") result.width = 1;
  if (words.size() > 1 && words[1] == "wide") result.width = 8;
  if (words.size() > 1 && words[1] == "param") result.verb = Verb::mov;  // parameters are registers here
  if (space == std::string::npos) return result;
  std::vector<std::string> operands = split(line.substr(space), ',');
  if (result.verb == Verb::branch) {
    branches_.emplace_back(program_.size(), operands[0]);
    return result;
  }
  if (result.verb == Verb::xor3) {
    if (operands.back() != "0x96") throw std::invalid_argument("unknown: " + result.line);
    operands.pop_back();
  }
  for (const std::string& word : operands) result.operands.push_back(operand(word, &result.offset));
  return result;
}

Ptx::Ptx(const std::string& text) : registers_(3) {
  for (uint64_t lane = 0; lane < 32; ++lane) registers_[kThread][lane] = lane;
  for (const std::string& raw : split(text, '\n')) {
    std::string line = trimmed(raw);
    if (line.empty() || line == "{" || line == "}" || line.starts_with(".version") ||
        line.starts_with(".target") || line.starts_with(".address_size"))
      continue;
    if (line.starts_with(".visible .entry ")) {
      const size_t open = line.find('(');
      entry_ = line.substr(16, open - 16);
      for (const std::string& one : split(line.substr(open + 1, line.find(')') - open - 1), ',')) {
        parameters_.push_back(fresh(0));
        names_[split(one, ' ').back()] = parameters_.back();
      }
      continue;
    }
    if (line.ends_with(":")) {
      labels_[line.substr(0, line.size() - 1)] = program_.size();
      continue;
    }
    if (!line.ends_with(";")) throw std::invalid_argument("unknown: " + line);
    line.pop_back();
    if (line.starts_with(".reg")) {
      for (const std::string& one : split(line.substr(line.find('%')), ',')) {
        const size_t many = one.find('<');
        const int count = many == std::string::npos ? 1 : std::stoi(one.substr(many + 1));
        for (int k = 0; k < count; ++k)
          names_[many == std::string::npos ? one : one.substr(0, many) + std::to_string(k)] = fresh(0);
      }
      continue;
    }
    program_.push_back(instruction(line));
  }
  for (const auto& [at, label] : branches_) program_[at].target = labels_.at(label);
}

// Loads and stores of the lanes that are set in `active`.
bool Ptx::move(const Instruction& now, std::vector<Lanes>& registers, uint32_t active) const {
  if (active == 0) return true;
  const bool loads = now.verb == Verb::load;
  const Lanes& places = registers[now.operands[loads ? 1 : 0]];
  const auto width = static_cast<uint64_t>(now.width);
  uint64_t lowest = UINT64_MAX, highest = 0;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if ((active >> lane & 1) == 0) continue;
    if ((places[lane] + now.offset) % width != 0) return false;
    lowest = std::min(lowest, places[lane] + now.offset);
    highest = std::max(highest, places[lane] + now.offset + width);
  }
  const bool together = reachable(lowest, highest - lowest);
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if ((active >> lane & 1) == 0) continue;
    const uint64_t at = places[lane] + now.offset;
    if (!together && !reachable(at, width)) return false;
    if (loads)
      registers[now.operands[0]][lane] = load(at, now.width);
    else
      __atomic_store_n(reinterpret_cast<uint32_t*>(at),
                       static_cast<uint32_t>(registers[now.operands[1]][lane]), __ATOMIC_RELAXED);
  }
  return true;
}

bool Ptx::run(uint32_t block, uint32_t threads, const std::vector<uint64_t>& arguments) const {
  std::vector<Lanes> registers = registers_;
  registers[kBlock].fill(block);
  for (size_t k = 0; k < parameters_.size(); ++k) registers[parameters_[k]].fill(arguments[k]);
  const uint32_t all = threads == 32 ? UINT32_MAX : (uint32_t{1} << threads) - 1;
  for (size_t at = 0; at < program_.size(); ++at) {
    const Instruction& now = program_[at];
    uint32_t active = all;
    if (now.guard != 0) {
      active = 0;
      for (uint32_t lane = 0; lane < 32; ++lane)
        active |= static_cast<uint32_t>((registers[now.guard][lane] != 0) != now.guard_inverted) << lane;
      active &= all;
    }
    if (now.verb == Verb::end) break;
    if (now.verb == Verb::branch) {
      if (active != 0 && active != all) throw std::logic_error("lanes part: " + now.line);
      if (active != 0) at = now.target - 1;
      continue;
    }
    if (now.verb == Verb::load || now.verb == Verb::store) {
      if (!move(now, registers, active)) return false;
      continue;
    }
    const auto source = [&](size_t k) -> const Lanes& {
      return registers[k < now.operands.size() ? now.operands[k] : 0];
    };
    const Lanes &a = source(1), &b = source(2), &c = source(3);
    Lanes& into = registers[now.operands[0]];
    const Lanes joined = now.joined ? c : Lanes{};  // it may be what is written
    const uint64_t mask = now.width == 8 ? UINT64_MAX : UINT32_MAX;
    const auto each = [&](Verb verb) __attribute__((always_inline)) {
      if (active == all) {
        for (uint32_t lane = 0; lane < 32; ++lane)
          into[lane] = computed(verb, now.width, a[lane], b[lane], c[lane]) & mask;
      } else {
        for (uint32_t lane = 0; lane < 32; ++lane)
          if (active >> lane & 1) into[lane] = computed(verb, now.width, a[lane], b[lane], c[lane]) & mask;
      }
    };
    switch (now.verb) {
      case Verb::xor3:
        each(Verb::xor3);
        break;  // nearly all
      case Verb::mov:
        each(Verb::mov);
        break;
      case Verb::selp:
        each(Verb::selp);
        break;
      default:
        each(now.verb);
    }
    if (now.joined)
      for (uint32_t lane = 0; lane < 32; ++lane) into[lane] &= joined[lane];
  }
  return true;
}

}  // namespace fake
