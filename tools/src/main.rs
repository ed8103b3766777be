//! The `remanent` command. The library does the work, so that tests can run commands without a process each.

fn main() -> std::process::ExitCode {
    remanent_tools::main()
}
