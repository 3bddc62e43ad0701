//! What handlers see and what becomes of what they do.

use super::*;

#[tokio::test]
async fn a_command_gets_state_request_and_context() {
    let module = Module::new(
        r#"export const commands = {
            open: { creates: true, handle(state, request) { state.balance = request.amount; return {}; } },
            charge: { handle(state, request, context) {
                if (state.balance < request.amount) throw reject("insufficient_funds", "balance too low", { balance: state.balance });
                state.balance -= request.amount;
                return { balance: state.balance, context };
            } },
            set: { handle(state, request, { replaceState }) { replaceState(request); } },
        };"#,
    )
    .await;
    let outcomes =
        module.run(&[("open", r#"{"amount":10}"#), ("charge", r#"{"amount":3}"#), ("charge", r#"{"amount":8}"#), ("set", "[1]"), ("nothing", "1")]).await;
    assert_eq!(
        outcomes.iter().map(show).collect::<Vec<_>>(),
        [
            r#"{} {"balance":10}"#,
            r#"{"balance":7,"context":{"commandId":"c-1","entityId":"e-1","now":1700000000123,"version":1}} {"balance":7}"#,
            r#"rejected {"code":"insufficient_funds","details":{"balance":7},"message":"balance too low"}"#,
            "null [1]",
            "UnknownCommand",
        ]
    );
}
